"""The large matrix products of a step on a CPU: in the dtype of the weights, or with operands rounded to bfloat16.

Products and their sums stay in float32 inside the processor. Some processors multiply bfloat16 several times as fast:

    AMX           170 GFLOP/s in float32, 680 to 870 in bfloat16. The library (oneDNN) rounds operands as it loads them
                  and returns float32, so nothing else changes.
    avx512_bf16   the library needs operands, and returns products, that are bfloat16 in memory. One core of a Zen 5:
                  240 GFLOP/s in float32, 370 to 430 in bfloat16.

Products with at most 16 rows, those of the recurrence, take twice as long with AMX. In float32, the default library,
MKL, uses AVX-512 only on Intel processors: 105 GFLOP/s on a Zen 5, and 240 with oneDNN (docs/benchmarks.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from flsim.base.progress import say
from flsim.models.language_model import Params
from flsim.training.hparams import Precision

TILE = 16  # rows
LARGE = 2**18  # entries of the largest weight
LINE = 64  # bytes of a cache line


def padded(columns: int, dtype: torch.dtype) -> int:
    """Return a number of columns, at least `columns`, that fills cache lines."""
    values = LINE // dtype.itemsize
    return -(-columns // values) * values


def aligned(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return an uninitialised tensor, in which rows of a matrix begin at cache lines, which makes products faster."""
    *rows, columns = shape
    return torch.empty(*rows, padded(columns, dtype), dtype=dtype)[..., :columns]


class Scratch:
    """Uninitialised memory by name, which grows to the largest requested size, and is reused."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = torch.empty(size, dtype=self._dtype)
        return flat[:size].view(shape)

    def aligned(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix as `aligned` does."""
        return self(name, rows, padded(columns, self._dtype))[:, :columns]


class Products:
    """Products in the dtype of their operands."""

    def rows(self, count: int) -> int:
        """Return the number of rows of a matrix of `count` positions, at least `count`; further rows are zero."""
        return count

    def operand(self, name: str, value: Tensor) -> Tensor:  # noqa: ARG002 (a name of memory, where that is needed)
        """Return a matrix as an operand of any number of products; the next operand with this name overwrites it."""
        return value

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """Write left right, plus the bias in each row, to `out`, and return it."""
        return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)

    def add(self, left: Tensor, right: Tensor, factor: float, into: Tensor) -> None:
        """Add factor times left right to `into`."""
        into.addmm_(left, right, alpha=factor)


class OneDNNProducts(Products):
    """Products of float32 operands by oneDNN, which rounds them to bfloat16 only on a processor with AMX.

    It compiles a kernel for each new shape, in up to 3 ms; multiples of 16 rows, an AMX tile, make shapes repeat.
    """

    def rows(self, count: int) -> int:
        return -(-count // TILE) * TILE

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        with by_onednn():
            torch.mm(left, right, out=out)
        if bias is not None:
            out.add_(bias)  # addmm would copy the bias to `out` first, and take longer
        return out

    def add(self, left: Tensor, right: Tensor, factor: float, into: Tensor) -> None:
        with by_onednn():
            super().add(left, right, factor, into)


class RoundedProducts(OneDNNProducts):
    """Products of operands that are bfloat16 in memory; each product is rounded to bfloat16 before it is added."""

    def __init__(self) -> None:
        self._low = Scratch(torch.bfloat16)

    def operand(self, name: str, value: Tensor) -> Tensor:
        return self._low(name, *value.shape).copy_(value)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        product = torch.mm(left, right, out=self._low("product", *out.shape))
        return out.copy_(product) if bias is None else torch.add(product, bias, out=out)

    def add(self, left: Tensor, right: Tensor, factor: float, into: Tensor) -> None:
        into.add_(torch.mm(left, right, out=self._low("product", *into.shape)), alpha=factor)


def products_for(precision: Precision, like: Params) -> Products:
    """Return the fastest products of this processor: MKL's for small models, because oneDNN takes longer to call."""
    if precision_here(precision) == "bf16":
        return OneDNNProducts() if torch.cpu.get_capabilities().get("amx_bf16") else RoundedProducts()
    return OneDNNProducts() if max(map(torch.numel, like.values())) >= LARGE and onednn_is_faster() else Products()


def precision_here(precision: Precision) -> Precision:
    """Return "float32", with a message, for bfloat16 on a processor without its instructions, which would be slower."""
    able = torch.cpu.get_capabilities()
    if precision != "bf16" or able.get("amx_bf16") or able.get("avx512_bf16"):
        return precision
    _say_that_float32_is_used()
    return "float32"


def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL and equally exactly: on AMD's processors with AVX-512.

    MKL uses AVX-512 on Intel processors only. With oneDNN, the model of the paper trains about 1.1 times as fast on a
    Zen 4. A Zen 5, which computes all 512 bits at once, gains more.
    """
    able = torch.cpu.get_capabilities()
    is_amd = "AMD" in able.get("cpu_name", "") and able.get("avx512_f")
    return bool(is_amd and not able.get("amx_bf16") and _torch_takes_onednn())


def _torch_takes_onednn() -> bool:
    """Return whether `by_onednn` has an effect: not if ONEDNN_MAX_CPU_ISA restricts it to older instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _say_that_float32_is_used() -> None:
    say('this processor has no instructions for bfloat16 (avx512_bf16, AMX); "bf16" computes in float32')


@contextmanager
def by_onednn() -> Iterator[None]:
    """Let oneDNN multiply float32 matrices in the block: torch uses it if operands may be rounded, as only AMX does."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
