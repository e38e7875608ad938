"""The parts of `make gpu` that time kernels: time by kind of kernel, and the recurrence with other tiles."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine import LAYOUT, DrawnUsers, profiled, start_of, table_of
from benchmarks.gpu.figures import Detail, Figure
from benchmarks.gpu.parts import AT_ONCE, Measured, Setup, failure, kernels_on_chip
from flsim.base.rng import stream
from flsim.training.cohort.engine import StackedTrainer
from flsim.training.cohort.packing import Participant
from flsim.training.update import LocalHParams

TILES = ((2**14, 2), (2**13, 3), (2**13, 2), (2**12, 4))  # bytes of a block of weights, and blocks loaded at once
RESIDENT = ((128, 4), (128, 8), (64, 4))  # units of a program whose weights stay on the chip, and its warps
# Kernels by a part of their names; a kernel has the first kind that matches.
KINDS = {
    "recurrence, forward and backward": ("_recur_",),
    "output layer": ("_predict",),
    "gradients by weights, and update": ("_descend",),
    "products of cuBLAS": ("gemm", "nvjet", "cutlass", "cublas", "aten::bmm"),
    "gathers and the rest": ("",),
}


def profile(setup: Setup) -> Measured:
    """Measure the time of a micro-cohort: milliseconds of a step by kind of kernel, without CUDA graphs."""
    on_gpu = setup.device == "cuda"
    events, steps = _profiled(setup)
    times: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for event in events:
        kind = next(kind for kind, parts in KINDS.items() if any(part in event.key for part in parts))
        time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[kind] += time / 1e3 / steps
    yield Figure(f"a step of {_users(setup)} users", sum(times.values()), "ms")
    for kind, milliseconds in times.items():
        yield Figure(kind, milliseconds, "ms")
    yield Detail("all steps of a micro-cohort", table_of(events, on_gpu))


def _users(setup: Setup) -> int:
    return 2 if setup.is_quick else AT_ONCE


def _profiled(setup: Setup) -> tuple[Any, int]:
    """Return the events of a micro-cohort in bfloat16, and its number of steps."""
    users, hparams = _users(setup), LocalHParams(precision="bf16")
    records, start = DrawnUsers(users, 0, setup.words), start_of(torch.device(setup.device), setup.sizes)
    trainer = StackedTrainer(start, hparams, LAYOUT, users, graphs=False)
    packed = trainer.pack([Participant(records[user], stream(0, "local", 0, user)) for user in range(users)])
    return profiled(partial(trainer.train, start, packed), setup.device == "cuda"), len(packed.shapes)


def recurrence(setup: Setup) -> Measured:
    """Measure milliseconds of the recurrence in a step, forward and backward: other tiles, and weights on the chip.

    Set the fastest tiles as `BLOCK` and `STAGES` of `flsim.training.cohort.triton_positions`. If the recurrence of
    `benchmarks.gpu.resident` is faster, use it there.
    """
    if setup.device != "cuda":
        yield Figure("tiles", "a CPU has no kernel with tiles")
        return
    from benchmarks.gpu import resident
    from flsim.training.cohort import triton_positions

    variants: list[tuple[str, AbstractContextManager[Any], AbstractContextManager[Any]]] = [
        (
            f"{size // 1024} KB, {stages} stages",
            patch.multiple(triton_positions, BLOCK=size, STAGES=stages),
            nullcontext(),
        )
        for size, stages in TILES
    ]
    variants += [
        (
            f"on the chip, {units} units, {warps} warps",
            patch.multiple(resident, UNITS=units, WARPS=warps),
            kernels_on_chip(),
        )
        for units, warps in RESIDENT
    ]
    for name, sizes, kernels in variants:
        try:
            with sizes, kernels:
                events, steps = _profiled(setup)
        except Exception as error:  # measure the other tiles after any error
            yield failure(name, error)
            continue
        times = {"forth": 0.0, "back": 0.0}
        for event in events:
            if "_recur_" in event.key:
                times["back" if "_back" in event.key else "forth"] += event.self_device_time_total / 1e3 / steps
        for way, milliseconds in times.items():
            yield Figure(f"{name}, {way}", milliseconds, "ms")
