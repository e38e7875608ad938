"""Tests that every Triton kernel compiles for an H200 within its limits, at the sizes of the paper's model."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flsim.base.rng import stream
from flsim.data.corpus import Split
from flsim.data.records import Layout, Records
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.training.central import CentralHParams, CentralTraining, init
from flsim.training.central.training import StackedEngine
from flsim.training.cohort.engine import StackedTrainer
from flsim.training.cohort.packing import Participant
from flsim.training.update import LocalHParams

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")

SHARED = 227 * 1024  # largest shared memory of a program, in bytes: NVIDIA's Hopper tuning guide, section 1.4.1.1
SHARED_OF_AN_A100 = 163 * 1024  # NVIDIA's Ampere tuning guide, section 1.4.2.2
MULTIPROCESSOR = 228 * 1024, 64 * 1024  # bytes of shared memory, and number of registers: the same section
RESERVED = 1024  # bytes of shared memory that CUDA uses in each program: the same section
STACK = 16  # largest stack of a thread, in bytes, for values that do not fit into registers
# Functions that kernels call, and that are not launched.
CALLED = {"_tanh", "_summed", "_gate", "_advanced", "_differentiated", "_former", "_settle", "_times", "_rows"}
CALLED |= {"_store_gradient", "_group", "_share", "_arrive", "_wait", "_at", "_sum", "_three", "_both"}
TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int32: "*i32"}


class Compiler:
    """A replacement of a kernel whose launch only compiles the kernel for its arguments, and keeps the machine code."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> "Compiler":
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        triton = pytest.importorskip("triton")
        options = {name: named.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in named}
        named |= dict(zip(self.kernel.arg_names, arguments, strict=False))
        constant = {param.name for param in self.kernel.params if param.is_constexpr}
        fixed = {
            name: value for name, value in named.items() if name in constant or (type(value) is int and value == 1)
        }
        types, aligned = {}, {}
        for place, name in enumerate(self.kernel.arg_names):
            value = named[name]
            if isinstance(value, torch.Tensor):
                types[name] = TYPES[value.dtype]
                assert value.data_ptr() % 16 == 0, name
            else:
                types[name] = "constexpr" if name in fixed else "fp32" if isinstance(value, float) else "i32"
            if name not in fixed and (isinstance(value, torch.Tensor) or value % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
        key = repr((types, fixed, aligned))
        if key not in self.compiled:
            source = triton.compiler.ASTSource(self.kernel, types, fixed, aligned)
            target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
            self.compiled[key] = triton.compile(source, target=target, options=options)


def usage(machine_code: bytes, resource: str, folder: Path) -> int:
    """Return the registers of a thread (REG), or the bytes of its stack (STACK), as NVIDIA's cuobjdump reports."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    (folder / "code").write_bytes(machine_code)
    said = subprocess.run([tool, "--dump-resource-usage", folder / "code"], check=True, capture_output=True, text=True)
    return int(re.findall(rf"{resource}:(\d+)", said.stdout)[0])


def waiting_loads(compiled: Any, depth: int = 2) -> list[str]:
    """Return loads of blocks in `depth` nested loops that Triton has not moved ahead; programs wait for each."""
    loops, loads = [False], []
    for line in compiled.asm["ttgir"].splitlines():
        if line.lstrip().startswith("}"):
            loops.pop()
        if sum(loops) >= depth and re.search(r"tt\.load.*tensor<\d+x\d+x", line):
            loads.append(line)
        if line.rstrip().split(" loc(")[0].endswith("{"):
            loops.append("scf.for" in line)
    return loads


def compilers_in(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[Compiler]:
    """Replace all kernels of these modules that are launched by compilers, and return the compilers."""
    compilers = []
    for module in modules:
        for name, kernel in list(vars(module).items()):
            if type(kernel).__name__ == "JITFunction" and name not in CALLED:
                compilers.append(Compiler(kernel))
                monkeypatch.setattr(module, name, compilers[-1])
    return compilers


def assert_within_limits(compilers: list[Compiler], folder: Path) -> None:
    for compiled in (compiled for compiler in compilers for compiled in compiler.compiled.values()):
        assert compiled.metadata.shared <= SHARED, compiled.name
        assert usage(compiled.asm["cubin"], "STACK", folder) <= STACK, compiled.name


def assert_gates_are_prefetched(compilers: list[Compiler]) -> None:
    """Check that neither direction waits for loads of gates: a block of units takes less time than a load."""
    recurrences = [c for c in compilers if "recur" in c.kernel.fn.__name__ and c.compiled]
    assert len(recurrences) == 2
    for compiled in (compiled for compiler in recurrences for compiled in compiler.compiled.values()):
        assert "scf.for" in compiled.asm["ttgir"]
        assert waiting_loads(compiled) == [], compiled.name


@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", "adam"), ("tf32", "sgd"), ("float32", "momentum")])
def test_a_step_compiles(precision: Any, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a step, its norm and its update compile; in float32, PyTorch computes the recurrence."""
    from flsim.training.cohort import triton_kernels, triton_positions

    compilers = compilers_in(monkeypatch, triton_kernels, triton_positions)
    layout, rng = Layout(10_000), stream(0, "test", "compiles")
    hparams = LocalHParams(precision=precision, optimizer=optimizer)
    records = Records.from_lists([rng.integers(1, 5_000, 2).tolist() for _ in range(hparams.batch_size)])
    start = CIFGLanguageModel(layout.vocabulary_size, ModelHParams()).initialize(0).state_dict()
    by_position = precision != "float32"
    kernels = triton_positions.TritonPositionKernels if by_position else triton_kernels.TritonKernels
    trainer = StackedTrainer(start, hparams, layout, 1, kernels(precision))
    trainer.train(start, trainer.pack([Participant(records, rng)]))
    trainer.norms()
    trainer.add_updates([1.0], {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()})
    used = {compiler.kernel.fn.__name__: len(compiler.compiled) for compiler in compilers if compiler.compiled}
    expected = {"_add_rows": 1, "_squares": 1, "_add_updates": 1} | ({} if optimizer == "sgd" else {"_optimize": 1})
    if by_position:
        assert_gates_are_prefetched(compilers)
        expected |= {"_recur_positions": 1, "_predict": 1, "_descend_predictions": 1, "_recur_positions_back": 1}
        expected |= {"_descend_positions": 2}
    else:
        expected |= {"_cross_entropy": 1}
    assert used == expected
    assert_within_limits(compilers, tmp_path)


def recur_by_position(kernels: Any, precision: Any, width: int, rows: int) -> None:
    """Launch the forward and the backward recurrence over two times, with the paper's 670 units padded to 672."""
    units, low = 672, torch.bfloat16 if precision == "bf16" else torch.float32
    gates, bias = torch.zeros(1, 2 * rows, 3 * units, dtype=low), torch.zeros(1, 3 * units, dtype=low)
    recurrent, projection = torch.zeros(1, width, 3 * units, dtype=low), torch.zeros(1, units, width, dtype=low)
    outputs, cells = torch.zeros(1, 2 * rows, width, dtype=low), torch.zeros(1, 2 * rows, units)
    starts = torch.tensor([[0, rows, 2 * rows]]).int()
    kernels.recur_positions(gates, bias, recurrent, projection, outputs, outputs, cells, gates, starts, rows)
    kernels.recur_positions_back(gates, recurrent, projection, outputs, cells, starts, rows)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_the_recurrence_of_the_widest_embeddings_fits_an_a100(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for batches of 64 records fit; the wider the embedding is, the fewer rows a program has."""
    from flsim.training.cohort import triton_positions
    from flsim.training.cohort.triton_kernels import WIDEST

    compilers = compilers_in(monkeypatch, triton_positions)
    recur_by_position(triton_positions.TritonPositionKernels(precision), precision, WIDEST[precision], rows=64)
    compiled = [compiled for compiler in compilers for compiled in compiler.compiled.values()]
    assert len(compiled) == 2
    assert max(one.metadata.shared for one in compiled) <= SHARED_OF_AN_A100


def test_two_programs_whose_weights_stay_on_the_chip_fit_a_multiprocessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops of a program load only the 16 rows of a batch, and no weights, which have at least 32 rows."""
    from benchmarks.gpu import resident

    compilers = compilers_in(monkeypatch, resident)
    recur_by_position(resident.ResidentPositionKernels("bf16"), "bf16", 96, rows=16)
    compiled = [compiled for compiler in compilers for compiled in compiler.compiled.values()]
    assert len(compiled) == 2
    assert_within_limits(compilers, tmp_path)
    for one in compiled:
        shared, registers = (resource // 2 for resource in MULTIPROCESSOR)
        assert one.metadata.shared + RESERVED <= shared
        assert 32 * one.metadata.num_warps * usage(one.asm["cubin"], "REG", tmp_path) <= registers
        assert one.metadata.shared >= 4 * 96 * resident.UNITS * 2  # three gates and the projection, in bfloat16
        loads = waiting_loads(one, depth=1)
        assert loads
        assert all("tensor<16x" in line for line in loads)


@pytest.mark.parametrize(
    "hparams",
    [
        CentralHParams(batch_size=256, optimizer="rmsprop", precision="tf32", gradient_clip=1.0, weight_decay=0.1),
        CentralHParams(optimizer="adam", dropout=0.1),
    ],
    ids=["tf32", "adam"],
)
def test_a_step_of_central_training_compiles(
    hparams: CentralHParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels of a step of one user compile; the recurrence of one user has separate kernels."""
    from flsim.training.cohort import triton_kernels, triton_spread

    compilers = compilers_in(monkeypatch, triton_kernels, triton_spread)
    layout, rng = Layout(5_008), stream(0, "test", "compiles")
    records = Records.from_lists([rng.integers(1, 5_000, 3).tolist() for _ in range(hparams.batch_size)])
    users = Split(layout, records.tokens, records.offsets, np.array([0, len(records)]), Path("nowhere"))
    training = CentralTraining(users, replace(hparams, steps=1), 0)
    state = init(layout.vocabulary_size, ModelHParams(), 0)
    engine = StackedEngine(training, state, triton_spread.SpreadKernels(hparams.precision))
    engine.train(engine.pack(training.chunk(0, 1)))
    used = {compiler.kernel.fn.__name__ for compiler in compilers if compiler.compiled}
    assert used >= {"_cell", "_cell_back", "_cross_entropy", "_add_neighbors"}
    assert ("_optimize" in used) == (hparams.optimizer != "sgd")
    assert_within_limits(compilers, tmp_path)
