"""The optimizer of DP-SGD: opacus' clip, sum, noise and scale, with noise that is a function of a seed and a step."""

from typing import Any

import torch
from opacus.optimizers import DPOptimizer

from flsim.base.rng import stream


class SeededDPOptimizer(DPOptimizer):  # type: ignore[misc]
    """The optimizer of opacus with noise from (seed, step), equal on every device and in a resumed run."""

    def __init__(self, optimizer: torch.optim.Optimizer, seed: int, step: int, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self.seed, self.at = seed, step

    def add_noise(self) -> None:
        """Set p.grad to the summed clipped gradients + N(0, (z C)^2)."""
        deviation = self.noise_multiplier * self.max_grad_norm
        for index, parameter in enumerate(self.params):
            parameter.grad = parameter.summed_grad
            if deviation:
                noise = stream(self.seed, "record noise", self.at, index).normal(0.0, deviation, parameter.shape)
                parameter.grad = parameter.grad + torch.from_numpy(noise).to(parameter)
