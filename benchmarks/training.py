"""Benchmark of users per second of local training: the engines, the complete system, and other platforms, in one run.

All train the same users of the same synthetic corpus. The first round of each is not counted: it starts processes and
fills caches. These sides train from the same model, with the same batches in the same order, and must reach the same
model:

    local            the `local` engine only, in float32, on one thread
    cohort           the `cohort` engine only, on one thread
    system           `flsim run`: Flower, Ray, the engine, messages, aggregation, checkpoints; a client and a shard for
                     each processor
    system float32   the same in float32, where another precision was asked for
    pfl              pfl-research: a process of one thread for each processor, which was its fastest setting
    flower           Flower: a node for each user, FedAvg, its simulation on Ray; a client of one thread for each
                     processor

`pfl as it comes` and `flower as it comes` train as in the examples of these platforms: a plain LSTM of torch, of the
same sizes, over records that are all padded to the longest. They must lower the loss.
"""

import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.model import model_type
from benchmarks.peers.work import Result, Work
from benchmarks.rounds import BenchHParams, new_run, overhead, train
from benchmarks.sides import ROOT, plain_work_of, train_with_engines, train_with_peer, work_of
from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.runs.folder import Run
from flsim.training.update import Precision, global_norm

PEERS = ROOT / ".venv-peers" / "bin" / "python"
FAR = {"float32": 1e-4, "bf16": 2**-8}  # relative to the change by training: rounding causes at most 1e-5 and 1e-3
PROCESSORS = len(os.sched_getaffinity(0))
FULL = BenchHParams(users=16 * PROCESSORS)
TINY = BenchHParams(
    users=8 * PROCESSORS, words=20, rounds=13
)  # one or two steps per user: the rest of a round is overhead
PLAIN = " as it comes"
NAMES = ("local", "cohort", "system", "system float32", "pfl", "flower", f"pfl{PLAIN}", f"flower{PLAIN}")


def bench_training(
    peers: Path = PEERS,
    hparams: BenchHParams = FULL,
    tiny: BenchHParams = TINY,
    many_shards: int = 8,
    precision: Precision = "float32",
) -> dict[str, Any]:
    """Measure all sides.

    Args:
        peers: Python of the environment with pfl-research; without it there is no figure for pfl.
        hparams: the measured training.
        tiny: the training that measures the overhead of rounds, with a shard per processor and with `many_shards`.
        many_shards: a larger number of shards.
        precision: precision of `cohort` and `system`; all other sides train in float32.

    Returns:
        ``users_per_second`` of each side; ``ratios`` of some of them; ``distance`` of each side's final model from that
        of `local`, relative to the change by `local`; ``round_overhead_seconds`` by the number of shards; ``clients``
        of the system; the ``precision``; the ``unit`` of work.

    Raises:
        RunFailed: a side failed, or reached another model.
    """
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as name:
        folder = Path(name)
        in_float32 = new_run(folder / "float32", hparams, PROCESSORS)
        work = work_of(in_float32)
        work.save(folder / "work")
        plain = plain_work_of(work, in_float32)
        plain.save(folder / "plain")
        is_float32 = precision == "float32"
        local = replace(hparams.local, precision=precision)
        run = in_float32 if is_float32 else new_run(folder / precision, replace(hparams, local=local), PROCESSORS)
        say("training: local and cohort, on one thread")
        results = train_with_engines({"local": (in_float32, "local"), "cohort": (run, "cohort")})
        say(f"training: system, on {PROCESSORS} processors")
        log = train(run)
        results["system"] = _result(run, log)
        if not is_float32:
            say(f"training: system in float32, on {PROCESSORS} processors")
            results["system float32"] = _result(in_float32, train(in_float32))
        for title, file in (("", folder / "work"), (PLAIN, folder / "plain")):
            for peer, python in (("pfl", _launcher(peers)), ("flower", [sys.executable])):
                if python:
                    say(f"training: {peer}{title}, on {PROCESSORS} processors")
                    results[peer + title] = train_with_peer(peer, file, PROCESSORS, python)
    if not peers.exists():
        say(f"no figures for pfl: there is no {peers}; `make peers` installs pfl-research there")
    refuse_no_training({name: done for name, done in results.items() if name.endswith(PLAIN)}, plain)
    equal = {name: done for name, done in results.items() if not name.endswith(PLAIN)}
    low = ("cohort", "system")
    far = {name: FAR["float32"] if is_float32 or name not in low else FAR["bf16"] for name in equal}
    rates = {name: hparams.users * (hparams.rounds - 1) / sum(done.seconds[1:]) for name, done in results.items()}
    if is_float32:
        rates["system float32"] = rates["system"]
    say(f"overhead of a round with {PROCESSORS} and with {many_shards} shards")
    pairs = [("cohort", "local"), *(("system", other) for other in NAMES[3:])]
    return {
        "users_per_second": {name: rates.get(name) for name in NAMES},
        "ratios": {f"{one} / {other}": rates[one] / rates[other] if other in rates else None for one, other in pairs},
        "distance": distances(equal, work.start, far),
        "round_overhead_seconds": {str(shards): overhead(tiny, shards) for shards in sorted({PROCESSORS, many_shards})},
        "clients": len({worker for line in log[1:] for worker in line["workers"]}),
        "precision": precision,
        "unit": _unit(hparams),
    }


def _result(run: Run, log: list[dict[str, Any]]) -> Result:
    return Result(run.latest_state().params, [line["seconds"] for line in log])


def _launcher(peers: Path) -> list[str]:
    """Return the command that starts a process of pfl on each processor; empty if pfl is not installed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSORS)]
    return [str(peers), *launcher] if peers.exists() else []


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    rates = [
        f"{name:<18}" + (f"{rate:6.2f} users/s" if rate else "     -")
        for name, rate in measured["users_per_second"].items()
    ]
    ratios = [f"{name}: {ratio:.2f}" for name, ratio in measured["ratios"].items() if ratio]
    overheads = [
        f"a round's overhead with {shards} shards: {seconds:.2f} s"
        for shards, seconds in measured["round_overhead_seconds"].items()
    ]
    unit = f"unit: {measured['unit']}; cohort and system in {measured['precision']}"
    return "\n".join([unit, *rates, *ratios, *overheads])


def distances(results: Mapping[str, Result], start: Params, far: Mapping[str, float]) -> dict[str, float]:
    """Return the distance of each final model from that of `local`, relative to the distance of `local` from the start.

    Raises:
        RunFailed: a distance is larger than the limit of that side in `far`, so the training was not the same.
    """
    local = results["local"].params

    def apart(one: Params, other: Params) -> float:
        if one.keys() != other.keys():
            return math.inf
        return global_norm({name: one[name].double() - other[name].double() for name in one})

    relative = {name: apart(result.params, local) / apart(start, local) for name, result in results.items()}
    for name, distance in relative.items():
        if not distance < far[name]:
            raise RunFailed(
                f"{name} and local trained different models: the distance is {distance:.1%} of the change by training"
            )
    return relative


def refuse_no_training(results: Mapping[str, Result], work: Work) -> None:
    """Raise RunFailed if a final model does not predict the first user's records better than the first model."""
    inputs, targets = work.rounds[0][0]

    def loss(params: Params) -> float:
        with torch.no_grad():
            return float(model_type(work.start).from_params(params).loss(inputs, targets))

    before = loss(work.start)
    for name, result in results.items():
        after = loss(result.params) if result.params.keys() == work.start.keys() else math.nan
        if not after < before:
            raise RunFailed(f"{name} did not train: the loss was {before:.4f} before, and is {after:.4f} afterwards")


def _unit(hparams: BenchHParams) -> str:
    sizes = (hparams.model, hparams.vocabulary_size)
    model = "the full model" if sizes == (ModelHParams(), 10_000) else str(hparams.model)
    return (
        f"one user, {hparams.words:,} words, one local epoch at batch {hparams.local.batch_size}, "
        f"{model} (V = {hparams.vocabulary_size:,})"
    )
