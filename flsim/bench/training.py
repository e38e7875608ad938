"""Benchmark of users per second of local training: the engines, the whole system, and other platforms, in one run.

All train the same users of the same synthetic corpus, from the same model, with the same batches in the same order, and
must reach the same model. The first round of each is left out: it starts processes and warms caches.

    local    the `local` engine only, on one thread
    cohort   the `cohort` engine only, on one thread
    system   `flsim run`: Flower, Ray, the engine, messages, aggregation, checkpoints; a client and a shard per
    processor pfl      pfl-research: a process of one thread per processor, which was its fastest setting flower
    Flower: a node per user, FedAvg, its simulation on Ray; a client of one thread per processor
"""

import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.bench.peers.work import Result
from flsim.bench.rounds import BenchHParams, new_run, overhead, train
from flsim.bench.sides import ROOT, train_with_engines, train_with_peer, work_of
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.training.clip import global_norm

PEERS = ROOT / ".venv-peers" / "bin" / "python"
FAR = 1e-4  # of the way that training went: float32's rounding leaves 1e-5 or less
PROCESSORS = len(os.sched_getaffinity(0))
FULL = BenchHParams(users=16 * PROCESSORS)
TINY = BenchHParams(
    users=8 * PROCESSORS, words=20, rounds=13
)  # a step or two a user: what is left of a round is overhead
NAMES = ("local", "cohort", "system", "pfl", "flower")


def bench_training(
    peers: Path = PEERS, hparams: BenchHParams = FULL, tiny: BenchHParams = TINY, many_shards: int = 8
) -> dict[str, Any]:
    """Measure all sides.

    Args:
        peers: Python of the environment that pfl-research is installed in; without it there is no figure for pfl.
        hparams: the measured training.
        tiny: the training that measures the overhead of rounds, with a shard per processor and with `many_shards`.
        many_shards: a larger number of shards.

    Returns:
        ``users_per_second`` of each side; ``ratios`` of some of them; ``distance`` of each side's final model from that
        of `local`, relative to the change by `local`; ``round_overhead_seconds`` by the number of shards; ``clients``
        of the system; the ``unit`` of work.

    Raises:
        RunFailed: a side failed, or reached another model.
    """
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as name:
        folder = Path(name)
        run = new_run(folder, hparams, PROCESSORS)
        work = work_of(run)
        work.save(folder / "work")
        say("training: local and cohort, on one thread")
        results = train_with_engines(run, ("local", "cohort"))
        say(f"training: system, on {PROCESSORS} processors")
        log = train(run)
        results["system"] = Result(run.latest_state().params, [line["seconds"] for line in log])
        if peers.exists():
            say(f"training: pfl, on {PROCESSORS} processors")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSORS)]
            results["pfl"] = train_with_peer("pfl", folder, PROCESSORS, [str(peers), *launcher])
        else:
            say(f"no figure for pfl: there is no {peers}; `make peers` installs pfl-research there")
        say(f"training: flower, on {PROCESSORS} processors")
        results["flower"] = train_with_peer("flower", folder, PROCESSORS, [sys.executable])
    rates = {name: hparams.users * (hparams.rounds - 1) / sum(done.seconds[1:]) for name, done in results.items()}
    say(f"overhead of a round with {PROCESSORS} and with {many_shards} shards")
    return {
        "users_per_second": {name: rates.get(name) for name in NAMES},
        "ratios": {
            f"{one} / {other}": rates[one] / rates[other] if other in rates else None
            for one, other in (("cohort", "local"), ("system", "pfl"), ("system", "flower"))
        },
        "distance": distances(results, work.start),
        "round_overhead_seconds": {str(shards): overhead(tiny, shards) for shards in sorted({PROCESSORS, many_shards})},
        "clients": len({worker for line in log[1:] for worker in line["workers"]}),
        "unit": _unit(hparams),
    }


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    rates = [
        f"{name:<8}" + (f"{rate:6.2f} users/s" if rate else "     -")
        for name, rate in measured["users_per_second"].items()
    ]
    ratios = [f"{name}: {ratio:.2f}" for name, ratio in measured["ratios"].items() if ratio]
    overheads = [
        f"a round's overhead with {shards} shards: {seconds:.2f} s"
        for shards, seconds in measured["round_overhead_seconds"].items()
    ]
    return "\n".join([f"unit: {measured['unit']}", *rates, *ratios, *overheads])


def distances(results: Mapping[str, Result], start: Params) -> dict[str, float]:
    """Return the distance of each final model from that of `local`, relative to the distance of `local` from the start.

    Raises:
        RunFailed: a distance is too large for the same training.
    """
    local = results["local"].params

    def apart(one: Params, other: Params) -> float:
        if one.keys() != other.keys():
            return math.inf
        return global_norm({name: one[name].double() - other[name].double() for name in one})

    relative = {name: apart(result.params, local) / apart(start, local) for name, result in results.items()}
    for name, distance in relative.items():
        if not distance < FAR:
            raise RunFailed(f"{name} trained something else than local: its model is {distance:.1%} of the way off")
    return relative


def _unit(hparams: BenchHParams) -> str:
    sizes = (hparams.model, hparams.vocabulary_size)
    model = "the full model" if sizes == (ModelHParams(), 10_000) else str(hparams.model)
    return (
        f"one user, {hparams.words:,} words, one local epoch at batch {hparams.local.batch_size}, "
        f"{model} (V = {hparams.vocabulary_size:,})"
    )
