"""The parts of `make gpu`. Each is a generator, so that figures from before a failure or a timeout are not lost."""

import os
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.central import CentralBenchHParams, drawn, measure_central
from benchmarks.engine import (
    CLIP,
    FULL,
    LAYOUT,
    USER_WORDS,
    DrawnUsers,
    Held,
    bench_engine,
    start_of,
)
from benchmarks.evaluation import bench_evaluation
from benchmarks.gpu.figures import Detail, Figure
from flsim.base.errors import RunFailed
from flsim.base.rng import stream
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.cohort.engine import CohortEngine, products
from flsim.training.update import LocalHParams, Precision, UpdateSum, global_norm

ROOT = Path(__file__).parents[2]
TESTS = "tests/**/test_*cuda*.py"
AT_ONCE = 264  # users: two for each of an H200's 132 multiprocessors
# Precision, users at once, and whether the recurrence is that of `benchmarks.gpu.resident`. The most valuable first,
# and kernels that have not run on a GPU last.
ENGINE: tuple[tuple[Precision, int, bool], ...] = (
    ("bf16", AT_ONCE, False), ("bf16", 2 * AT_ONCE, False), ("bf16", AT_ONCE // 2, False), ("tf32", AT_ONCE, False),
    ("float32", AT_ONCE, False), ("bf16", AT_ONCE, True),
)  # fmt: skip
COHORT = 1_584  # users: a multiple of all numbers of users at once
Measured = Iterator[Figure | Detail]


@dataclass(frozen=True)
class Setup:
    """The device and the sizes of a measurement.

    Attributes:
        device: "cuda" or "cpu".
        is_quick: whether sizes are so small that all parts take a minute on a CPU.
    """

    device: str
    is_quick: bool

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return the precisions of the device, the fastest first."""
        return ("bf16", "float32") if self.device == "cpu" else ("bf16", "tf32", "float32")

    @property
    def words(self) -> int:
        """Return the number of words of a user."""
        return 40 if self.is_quick else USER_WORDS

    @property
    def sizes(self) -> ModelHParams:
        """Return the sizes of the model."""
        return ModelHParams(8, 12) if self.is_quick else FULL


def env(setup: Setup) -> Measured:
    """Describe the machine, and measure its memory bandwidth and its matrix products."""
    yield Figure("Python, torch, numpy", f"{platform.python_version()}, {torch.__version__}, {np.__version__}")
    yield Figure("Triton", _triton_version())
    yield Figure("CPU cores", len(os.sched_getaffinity(0)))
    device = torch.device(setup.device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, whole = torch.cuda.mem_get_info(device)
        yield Figure(
            "GPU",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}",
        )
        yield Figure("multiprocessors", properties.multi_processor_count)
        yield Figure("memory, free and total", f"{free / 1e9:.1f} and {whole / 1e9:.1f} GB")
    if tool := shutil.which("nvidia-smi"):
        query = "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.memory"
        command = [tool, query, "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        yield Figure("driver, limit of power, highest clocks", answer.stdout.strip())
    values = torch.zeros(2**20 if setup.is_quick else 2**29, device=device)
    copy = torch.empty_like(values)
    moved = 2 * values.numel() * values.itemsize
    yield Figure("copy in memory", moved / _fastest(lambda: copy.copy_(values), device) / 1e9, "GB/s")
    size = 2**8 if setup.is_quick else 2**13
    normals = torch.from_numpy(stream(0, "products").standard_normal((size, size), dtype=np.float32)).to(device)
    for precision in setup.precisions:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        matrix = normals.to(dtype)
        with products(precision, device):
            seconds = _fastest(partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix)), device)
        yield Figure(f"product in {precision}", 2 * size**3 / seconds / 1e12, "TFLOP/s")


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several repetitions."""
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _triton_version() -> str:
    try:
        import triton  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return "none"
    return str(triton.__version__)


def tests(setup: Setup) -> Measured:
    """Run the tests that need an NVIDIA GPU, file by file, without the fixtures of the complete project."""
    import pytest

    failed, paths = 0, sorted(ROOT.glob(TESTS))
    if not paths:
        raise RunFailed(f"{ROOT}: no tests, as in a package that is installed; run `make gpu` in a checkout")
    for path in paths:
        counter = _Counter()
        configuration = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        # Another release of torch or Triton may warn of what this one does not.
        options = ["--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-v", "--tb=short"]
        options += ["--maxfail=1"] if setup.is_quick else []
        code = int(pytest.main([*configuration, *options, str(path)], plugins=[counter]))
        counts = ", ".join(f"{count} {outcome}" for outcome, count in counter.counts.items())
        yield Figure(path.name, counts or f"no test ran (exit code {code})")
        for name in counter.failures:
            yield Figure(name, "failed")
        failed += len(counter.failures) + (code not in (0, 1))
    if failed:
        raise RunFailed(f"{failed} tests failed; tests.log has their errors")


class _Counter:
    """Plugin of pytest that counts outcomes.

    Attributes:
        counts: number of tests by outcome.
        failures: names of the tests that failed.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
        if report.outcome == "failed":
            self.failures.append(report.nodeid.rpartition("/")[2])


def engine(setup: Setup) -> Measured:
    """Measure users per second of rounds by precision and users that train at once, and peak memory."""
    rows, cohort, failed = ENGINE, COHORT, 0
    if setup.is_quick:
        rows, cohort = (("float32", 1, False), ("bf16", 2, False)), 2
    for precision, at_once, on_chip in rows:
        name = f"{precision}, {at_once} at once" + (", weights on the chip" if on_chip else "")
        try:
            with kernels_on_chip() if on_chip else nullcontext():
                measured = bench_engine(
                    setup.device, [at_once], [precision], cohort, words=setup.words, sizes=setup.sizes
                )
        except Exception as error:  # measure the other rows after any error
            yield failure(name, error)
            failed += 1
            continue
        for row in measured["rows"]:
            if "failed" in row:
                yield Figure(name, row["failed"])
                continue
            yield Figure(name, row["users_per_second"], "users/s")
            yield Figure(f"{name}: training only", row["training_alone"], "users/s")
            yield Figure(f"{name}: packing only", row["packing_alone"], "users/s")
            yield Figure(f"{name}: peak memory", row["peak_gigabytes"], "GB")
            yield Figure(f"{name}: memory by StackedTrainer.memory", row["said_gigabytes"], "GB")
    if failed:
        raise RunFailed(f"{failed} rows failed; engine.log has their errors")


def kernels_on_chip() -> AbstractContextManager[Any]:
    """Return a context in which trainers use the recurrence of `benchmarks.gpu.resident`."""
    from benchmarks.gpu.resident import ResidentPositionKernels
    from flsim.training.cohort import triton_positions

    return patch.object(triton_positions, "TritonPositionKernels", ResidentPositionKernels)


def failure(name: str, error: Exception) -> Figure:
    """Print an error with its place, and return a figure with the error."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines() or [""]
    return Figure(name, f"failed: {type(error).__name__}: {lines[0]:.100}")


def central(setup: Setup) -> Measured:
    """Measure milliseconds of a step of central training at batch 32 by precision, and of a plain PyTorch loop."""
    hparams = CentralBenchHParams((32,), turns=3, model=setup.sizes, precisions=setup.precisions)
    if setup.is_quick:
        hparams = replace(hparams, records=128, turns=2, users=2, threads=1)
    measured = measure_central(hparams, setup.device)
    for name, rate in measured["records_per_second"]["32"].items():
        yield Figure(name, 32e3 / rate, "ms a step")
        yield Figure(f"{name}: records", rate, "records/s")
    for name, distance in measured["distance"]["32"].items():
        yield Figure(f"{name}: distance from the plain loop's model", distance, "of the change by training")


def ranks(setup: Setup) -> Measured:
    """Measure seconds of exact ranks and of decisions, which must agree, of canaries of a full model."""
    canaries, count = (10, 500) if setup.is_quick else (90, 2_000_000)
    sizes = {"steps": 3, "units": 12} if setup.is_quick else {}
    measured = bench_evaluation(canaries, count, setup.device, **sizes)
    for name, what in (("decide", "decisions"), ("rank", "ranks"), ("straightforward", "straightforward scores")):
        at = measured["measured_at"][name]
        title = f"{what} of {at['canaries']} canaries, |R| {at['references']:,}"
        yield Figure(title, measured[f"{name}_seconds"], "s")
    yield Figure("memorized canaries", measured["memorized"])


def lora(setup: Setup) -> Measured:
    """Measure users per second of LoRA on GPT-2, one at a time and in blocks; it needs transformers and peft."""
    from benchmarks.lora import GPT2_SMALL, ONE_BILLION, LoraBenchHParams, bench_lora, unit_of

    sizes = {"GPT-2 small": GPT2_SMALL, "0.9 billion parameters": ONE_BILLION}
    if setup.is_quick:
        small = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
        sizes = {"tiny": LoraBenchHParams(small, 100, rank=2, dtype="bfloat16", single=2, at_once=(2, 4))}
    for size, hparams in sizes.items():
        yield Figure(f"{size}: unit", unit_of(hparams))
        for row in bench_lora(hparams, setup.device):
            name = f"{size}, {'one at a time' if row['at_once'] == 1 else 'blocks of ' + str(row['at_once'])}"
            yield Figure(name, row["users_per_second"], "users/s")
            yield Figure(f"{name}: peak memory", row["peak_gigabytes"], "GB")
            if row["at_once"] > 1:
                yield Figure(f"{name}: ratio", row["ratio"], "times one at a time")


def repeat(setup: Setup) -> Measured:
    """Compare bits: the same round twice, by another engine, and after a resume; central training after a resume."""
    differing, users = 0, Held(DrawnUsers(2 if setup.is_quick else AT_ONCE + 36, words=setup.words))
    for precision in setup.precisions:
        for name, distance in {**_rounds(precision, users, setup), **_central(precision, setup)}.items():
            yield Figure(f"{precision}: {name}", f"differs by {distance:.1e}" if distance else "the same bits")
            differing += distance != 0
    if differing:
        raise RunFailed(f"{differing} comparisons differ; the same work must give the same bits")


def _rounds(precision: Precision, users: Held, setup: Setup) -> dict[str, float]:
    """Return distances between sums of updates that should be equal, relative to their norm."""
    start, hparams = start_of(torch.device(setup.device), setup.sizes), LocalHParams(precision=precision)
    used = CohortEngine(start, LAYOUT, hparams)

    def train(engine: CohortEngine, params: Params, round_: int) -> UpdateSum:
        return engine.train(params, users, range(len(users)), 0, round_, CLIP)

    first, again = train(used, start, 0), train(used, start, 0)
    after = {name: (value.cpu() + first.delta[name] / first.counts.weight).float() for name, value in start.items()}
    second = train(used, after, 1)
    del used  # each engine uses all of the memory
    resumed = train(CohortEngine(start, LAYOUT, hparams), after, 1)
    other = train(CohortEngine(start, LAYOUT, hparams), start, 0)
    return {
        "the same round again": _distance(first.delta, again.delta),
        "the same round by another engine": _distance(first.delta, other.delta),
        "the next round by an engine that resumes": _distance(second.delta, resumed.delta),
    }


def _central(precision: Precision, setup: Setup) -> dict[str, float]:
    """Return the distance between parameters after central training with and without a resume halfway."""
    steps, hparams = 4 if setup.is_quick else 128, CentralHParams(precision=precision)
    training = CentralTraining(drawn(2 if setup.is_quick else 20), hparams, 0, device=setup.device)
    begin = init(LAYOUT.vocabulary_size, setup.sizes, 0)
    ((whole, _),) = train_central(begin, training, steps)
    ((half, _),) = train_central(begin, training, steps // 2)
    ((resumed, _),) = train_central(half, training, steps)
    return {"central training after a resume": _distance(whole.params, resumed.params)}


def _distance(one: Params, other: Params) -> float:
    return global_norm({name: one[name].double() - other[name].double() for name in one}) / global_norm(one)
