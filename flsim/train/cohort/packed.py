"""Local training on a CPU, one user at a time, with the model's gradient written out.

What makes it fast: no padding anywhere (a step is a sequence of ever shorter blocks, see `Steps`), the gradient of the
cross-entropy in place of the logits, all that does not depend on another time step done for all of them at once,
buffers that are used again, and for plain SGD weights that the matrix products themselves update.

Shapes: N positions of a step, D embedding, H units, V vocabulary; gates f, o, g as in `flsim.model.cifg`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flsim.model.cifg import Params
from flsim.train.clip import global_norm
from flsim.train.cohort.steps import Steps
from flsim.train.hparams import LocalHParams
from flsim.train.local import bound_norm

RARE = 1e-30  # a probability below it has lost digits; its logarithm is taken of the logits


@dataclass(frozen=True)
class Tape:
    """What reading leaves for the gradient; blocks of one time after another.

    Attributes:
        read: [N, D], embeddings of the inputs.
        gates: [N, 3H], f, o, g.
        memory: [N, H], c.
        bounded: [N, H], tanh c.
        hidden: [N, H], o tanh c.
        outputs: [N, D], r.
        sizes: rows of each block, in descending order.
    """

    read: Tensor
    gates: Tensor
    memory: Tensor
    bounded: Tensor
    hidden: Tensor
    outputs: Tensor
    sizes: list[int]

    @property
    def previous(self) -> Tensor:
        """int64 [N - sizes[0]], the position one time earlier of each that has one."""
        before, now = torch.tensor((self.sizes[:-1], self.sizes[1:]), dtype=torch.int64)
        return torch.arange(self.sizes[0], len(self.read)) - torch.repeat_interleave(before, now)


class PackedTrainer:
    """Trains one user after another, each from the global parameters; a `flsim.train.cohort.engine.Trainer`.

    Args:
        like: parameters of the model, for names, shapes and dtype (float32 or float64); on a CPU.
        hparams: local training, in precision "float32".
    """

    def __init__(self, like: Params, hparams: LocalHParams) -> None:
        self._hparams = hparams
        self._weights = {name: torch.empty_like(value) for name, value in like.items()}
        self._start: Params = {}
        self._buffers: dict[str, Tensor] = {}

    def pack(self, group: list[Steps]) -> list[Steps]:
        return group

    @torch.no_grad()
    def train(self, start: Params, group: Sequence[Steps]) -> tuple[list[float], list[int]]:
        (steps,) = group
        self._start = start
        for name, value in self._weights.items():
            value.copy_(start[name])
        hparams = self._hparams
        plain = hparams.optimizer == "sgd" and hparams.gradient_clip is None and not hparams.proximal
        optimizer = None if plain else hparams.optimizer_over(list(self._weights.values()))
        inputs, targets = torch.from_numpy(steps.inputs), torch.from_numpy(steps.targets)
        loss, first = 0.0, 0
        for end, sizes in zip(steps.ends.tolist(), steps.sizes(), strict=True):
            loss += self._step(inputs[first:end], targets[first:end], sizes, optimizer)
            first = end
        return [loss], [first]

    @torch.no_grad()
    def norms(self) -> list[float]:
        for name, value in self._weights.items():
            value.sub_(self._start[name])
        return [global_norm(self._weights)]

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        (factor,) = factors
        if factor:
            for name, update in self._weights.items():
                into[name].add_(update, alpha=factor)

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory of that name; it grows to the largest that is asked for."""
        wanted = torch.Size(shape).numel()
        found = self._buffers.get(name)
        if found is None or len(found) < wanted:
            found = self._buffers[name] = self._weights["output_bias"].new_empty(wanted)
        return found[:wanted].view(shape)

    def _step(
        self, inputs: Tensor, targets: Tensor, sizes: list[int], optimizer: torch.optim.Optimizer | None
    ) -> float:
        """One batch; returns its summed loss."""
        tape = self._read(inputs, sizes)
        loss, errors = self._cross_entropy(tape.outputs, targets)
        d_outputs = torch.mm(errors, self._weights["embedding"], out=self._buffer("d_outputs", *tape.outputs.shape))
        d_gates = self._back(tape, d_outputs)
        d_read = torch.mm(d_gates, self._weights["input_weight"].T)
        products = {
            "embedding": (errors, tape.outputs),
            "input_weight": (tape.read, d_gates),
            "recurrent_weight": (tape.outputs[tape.previous], d_gates[sizes[0] :]),
            "projection": (tape.hidden, d_outputs),
        }
        self._descend(products, {"gate_bias": d_gates, "output_bias": errors}, inputs, d_read, optimizer)
        return loss

    def _read(self, inputs: Tensor, sizes: list[int]) -> Tape:
        w, count, (units, width) = self._weights, len(inputs), self._weights["projection"].shape
        read = torch.index_select(w["embedding"], 0, inputs, out=self._buffer("read", count, width))
        gates = torch.addmm(w["gate_bias"], read, w["input_weight"], out=self._buffer("gates", count, 3 * units))
        memory, bounded, hidden = (self._buffer(name, count, units) for name in ("memory", "bounded", "hidden"))
        outputs = self._buffer("outputs", count, width)
        blocks = (torch.split_with_sizes(part, sizes) for part in (gates, memory, bounded, hidden, outputs))
        before: tuple[Tensor, Tensor] | None = None
        for gate, c, tanh_c, m, r in zip(*blocks, strict=True):
            if before:
                gate.addmm_(before[1][: len(gate)], w["recurrent_weight"])
            f, o = gate[:, : 2 * units].sigmoid_().chunk(2, dim=1)
            g = gate[:, 2 * units :].tanh_()
            torch.lerp(g, before[0][: len(gate)] if before else torch.zeros_like(g), f, out=c)  # f c + (1 - f) g
            torch.mm(torch.mul(o, torch.tanh(c, out=tanh_c), out=m), w["projection"], out=r)
            before = c, r
        return Tape(read, gates, memory, bounded, hidden, outputs, sizes)

    def _cross_entropy(self, outputs: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """The summed loss, and its gradient by the logits [N, V], in their place."""
        bias, embedding = self._weights["output_bias"], self._weights["embedding"]
        logits = torch.addmm(bias, outputs, embedding.T, out=self._buffer("logits", len(outputs), len(embedding)))
        errors = torch.softmax(logits, -1, out=logits)
        own = torch.arange(len(targets))
        chosen = errors[own, targets]
        losses, rare = -chosen.log(), chosen < RARE
        if bool(rare.any()):
            again = torch.addmm(bias, outputs[rare], embedding.T)
            losses[rare] = cross_entropy(again, targets[rare], reduction="none")
        errors[own, targets] = chosen - 1
        return float(losses.sum()), errors

    def _back(self, tape: Tape, d_outputs: Tensor) -> Tensor:
        """Gradient by the gates' inputs [N, 3H], in the gates' place; `d_outputs` becomes the whole gradient by r.

        A gate's gradient is that of c, or of o tanh c, times a factor that no other time changes: factors come first.
        """
        w, count, first, units = self._weights, len(d_outputs), tape.sizes[0], tape.hidden.shape[1]
        gates = tape.gates.view(count, 3, units)
        f, o, g = gates.unbind(1)
        kept = self._buffer("kept", count, units).copy_(f)
        through = torch.addcmul(o, tape.hidden, tape.bounded, value=-1)  # dc = dm o (1 - tanh^2 c)
        gained = g.neg()
        gained[first:] += tape.memory[tape.previous]
        torch.ops.aten.sigmoid_backward(gained, kept, grad_input=f)  # df = dc (c_{t-1} - g) f (1 - f)
        torch.ops.aten.tanh_backward(1 - kept, g, grad_input=g)  # dg = dc (1 - f) (1 - g^2)
        torch.ops.aten.sigmoid_backward(tape.bounded, o, grad_input=o)  # do = dm tanh c o (1 - o)
        blocks = (torch.split_with_sizes(part, tape.sizes) for part in (gates, through, kept, d_outputs))
        carried, later = tape.hidden.new_zeros(first, units), None
        for d_gate, to_c, keep, d_r in reversed(list(zip(*blocks, strict=True))):
            if later is not None:
                d_r[: len(later)].addmm_(later, w["recurrent_weight"].T)
            dm = torch.mm(d_r, w["projection"].T)
            dc = carried[: len(dm)].addcmul_(dm, to_c)
            d_gate[:, ::2].mul_(dc[:, None])
            d_gate[:, 1].mul_(dm)
            dc.mul_(keep)
            later = d_gate.view(-1, 3 * units)
        return gates.view(count, 3 * units)

    def _descend(
        self,
        products: dict[str, tuple[Tensor, Tensor]],
        sums: dict[str, Tensor],
        inputs: Tensor,
        d_read: Tensor,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """One step of the optimizer on the mean over positions.

        Args:
            products: gradients a' b of the summed loss, as (a, b).
            sums: gradients that are sums over positions.
            inputs, d_read: tokens, and the gradients by their embeddings.
            optimizer: None for plain SGD, which adds the products to the weights.
        """
        into, scale = self._weights, -self._hparams.learning_rate / len(inputs)
        if optimizer is not None:
            into = {name: self._buffer(f"d {name}", *value.shape).zero_() for name, value in into.items()}
            scale = 1 / len(inputs)
        for name, (left, right) in products.items():
            into[name].addmm_(left.T, right, alpha=scale)
        for name, terms in sums.items():
            into[name].add_(terms.sum(0), alpha=scale)
        into["embedding"].index_add_(0, inputs, d_read, alpha=scale)
        if optimizer is None:
            return
        if self._hparams.proximal:
            for name, weight in self._weights.items():
                into[name].add_(weight - self._start[name], alpha=self._hparams.proximal)
        gradients: Sequence[Tensor] = list(into.values())
        if self._hparams.gradient_clip is not None:
            gradients = bound_norm(gradients, self._hparams.gradient_clip)
        for weight, gradient in zip(self._weights.values(), gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
