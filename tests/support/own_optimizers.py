"""Custom optimizers and schedules, in a file as a user writes it."""

OWN = '''import torch

from flsim.algorithms.server_optimizers import ServerOptimizer, elementwise
from flsim.training.optimizers import Optimizer


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2, without weight decay."""

    def __init__(self, parameters, lr, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["m"] = torch.zeros_like(weight)
                weight.sub_(torch.sign(first * state["m"] + (1 - first) * weight.grad), alpha=group["lr"])
                state["m"].mul_(second).add_(weight.grad, alpha=1 - second)


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr)


def decayed(parameters, lr, weight_decay=0.0):
    return torch.optim.SGD(parameters, lr, 0.9, weight_decay=weight_decay)


def _signed(gradient, moments, _corrections, momentum):
    m = momentum * moments[0] + (1 - momentum) * gradient
    return m.tanh(), (m,)


class Tanh(torch.optim.Optimizer):
    """Steps along tanh(m), which rounding changes by no more than m."""

    def __init__(self, parameters, lr, momentum):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                m = self.state[weight].setdefault("m", torch.zeros_like(weight))
                m.mul_(group["momentum"]).add_(weight.grad, alpha=1 - group["momentum"])
                weight.sub_(m.tanh(), alpha=group["lr"])


def made(parameters, lr):
    return Tanh(parameters, lr, 0.9)


def _over(parameters, rate, momentum, _decay):
    return Tanh(parameters, rate, momentum)

stacked = Optimizer("Tanh", _over, ("m",), direction=_signed)

fedadam = elementwise(
    "Mine",
    lambda x, settings: {"m": torch.zeros_like(x), "v": torch.full_like(x, settings.server_tau**2)},
    lambda d, slots, settings: _fedadam(d, slots["m"], slots["v"], settings),
)


def _fedadam(d, m, v, settings):
    """Reddi et al. (2021), Algorithm 2, FedAdam."""
    m = settings.server_momentum * m + (1 - settings.server_momentum) * d
    v = settings.server_beta2 * v + (1 - settings.server_beta2) * d.square()
    return m / (v.sqrt() + settings.server_tau), {"m": m, "v": v}


def _init(x, settings):
    return {"m": {n: torch.zeros_like(v) for n, v in x.items()}, "step": {n: torch.zeros(()) for n in x}}


def _apply(x, d, moments, eta, settings):
    """A step of the length eta along the direction of the bias-corrected mean of updates, over all tensors."""
    beta, step = settings.server_momentum, {n: count + 1 for n, count in moments["step"].items()}
    m = {n: beta * moments["m"][n] + (1 - beta) * d[n] for n in x}
    mean = {n: m[n] / (1 - beta ** step[n]) for n in x}
    norm = sum(value.square().sum() for value in mean.values()).sqrt()
    return {n: x[n] + eta * mean[n] / (norm + 1e-12) for n in x}, {"m": m, "step": step}

normalized = ServerOptimizer("Normalized", _init, _apply)


def halves(round_, rounds):
    return 0.5**round_


class Counting(torch.optim.SGD):
    """Keeps a number, as old optimizers do."""

    @torch.no_grad()
    def step(self):
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1


class Grouped(torch.optim.SGD):
    def step(self):
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Failing(torch.optim.SGD):
    def step(self):
        raise ArithmeticError("no way down")


def no_optimizer(parameters, lr):
    return lr


def other_arguments(parameters, learning_rate):
    return torch.optim.SGD(parameters, learning_rate)

bad = ServerOptimizer("Bad", lambda x, settings: {}, lambda x, d, moments, eta, settings: (d | {"more": d}, {}))
alone = ServerOptimizer("Alone", lambda x: {}, lambda x, d: x)
forgetful = ServerOptimizer("Forgetful", _init, lambda x, d, moments, eta, settings: (x, {}))


def negative(round_, rounds):
    return -1.0
'''
