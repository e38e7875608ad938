"""LoRA: the settings of low-rank adapters, and the layers of many users that train on one base at once.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022), section 4.1: h = W x + (alpha / r) B A x, with W
frozen, A drawn at random and B zeros at first, so that training begins with the base.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from flsim.base.settings import Count, Fraction, Positive, settings

Dtype = Literal["float32", "bfloat16"]


@settings
class LoraHParams:
    """Settings of the adapters that are trained in place of all weights.

    Attributes:
        rank: Rank r of the adapters. Unit: dimensions.
        alpha: The adapters' output is multiplied by alpha / rank. Unit: none.
        targets: Layers with adapters, by the last parts of their names, such as ["c_attn"] or ["q_proj", "v_proj"];
            "all-linear" is every linear layer but the output layer.
        freeze_a: Train only B, as in FFA-LoRA (Sun et al., 2024). The matrices A are then part of the frozen base.
        dropout: Probability to drop a value of an adapter's input in training. Above 0, engine "local" trains. Unit:
            probability.

    Examples:
        >>> flsim.Lora(rank=16, alpha=32, targets=("c_attn",))                 # doctest: +SKIP
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ("all-linear",)
    freeze_a: bool = False
    dropout: Fraction = 0.0


class LoraBlocks(nn.Module):
    """A linear layer with an adapter for each of K users, who have equal numbers of rows in a batch, one after another.

    Users share the frozen `base`; `scale` is alpha / r. A is [K, r, inputs], or `frozen_a` [1, r, inputs] if only B,
    [K, outputs, r], is trained; `name_of_a` and `name_of_b` are their names among the model's parameters.
    """

    A: Tensor
    B: Tensor

    def __init__(self, base: nn.Module, scale: float, name_of_a: str, name_of_b: str, frozen_a: Tensor) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.name_of_a, self.name_of_b, self.frozen_a = name_of_a, name_of_b, frozen_a

    def forward(self, x: Tensor) -> Tensor:
        """Return base(x) + scale B A x, [K rows, T, outputs], of x [K rows, T, inputs]; adapters compute in float32."""
        y: Tensor = self.base(x)
        rows = x.to(self.B.dtype).reshape(len(self.B), -1, x.shape[-1])
        low = torch.bmm(torch.bmm(rows, self.A.expand(len(self.B), -1, -1).mT), self.B.mT)
        return torch.add(y, low.view(y.shape), alpha=self.scale).to(y.dtype)
