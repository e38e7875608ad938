"""Benchmark of what an audit detects: runs with a broken mechanism, and ledgers that each method refutes.

It makes the table of docs/audit-tests.md, "What an audit detects". A repetition trains a small model for 20 rounds
with each mechanism, audits the simulation as `flsim audit` does, and counts which methods contradict the ledger.
Intervals are Clopper-Pearson's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flsim
from benchmarks import broken
from flsim.base.progress import progress
from flsim.base.statistics import share_interval
from flsim.models.language_model import Params
from flsim.runs.simulation import Planted
from flsim.training import update
from flsim.training.update import UpdateSum, clip_factor, global_norm

USERS, COHORT, ROUNDS, NOISE = 400, 40, 20, 2.0
MODEL = flsim.Model(8, 12)
METHODS = {
    "canary users": "trade-off, canary users by coins",
    "participation": "participation",
    "noise": "noise",
}


def own(name: str) -> str:
    """Return the setting that names a class of `benchmarks.broken`."""
    return f"{broken.__file__}:{name}"


@contextmanager
def without_clip() -> Iterator[None]:
    """Do not clip updates in the block."""
    setattr(update, "clip_factor", lambda norm, bound: 1.0)  # noqa: ARG005, B010
    try:
        yield
    finally:
        setattr(update, "clip_factor", clip_factor)  # noqa: B010


@contextmanager
def clip_of_each_layer() -> Iterator[None]:
    """Clip each tensor of an update to the clip norm, and not the update."""
    honest = UpdateSum.of_user

    def of_user(delta: Params, examples: int, loss: float, tokens: int, *, clip: float, **others: Any) -> UpdateSum:
        layers = {name: value * clip_factor(global_norm({name: value}), clip) for name, value in delta.items()}
        whole = global_norm(layers)
        part = honest(layers, examples, loss, tokens, clip=clip, **others)
        return replace(part, delta={name: value / clip_factor(whole, clip) for name, value in part.delta.items()})

    UpdateSum.of_user = of_user  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UpdateSum.of_user = honest  # type: ignore[method-assign]


@dataclass(frozen=True)
class Mechanism:
    """A mechanism: custom code that a run names, and a change of the platform's code during training."""

    sampler: str = "poisson"
    noise: str = "independent"
    change: Callable[[], AbstractContextManager[None]] = nullcontext


MECHANISMS = {
    "honest": Mechanism(),
    "no clip": Mechanism(change=without_clip),
    "a clip per layer": Mechanism(change=clip_of_each_layer),
    "noise divided by the square root of the cohort": Mechanism(noise=own("DividedByCohort")),
    "the same noise in every round": Mechanism(noise=own("SameEveryRound")),
    "one cohort of a fixed seed": Mechanism(sampler=own("FixedCohort")),
    "one user counted 50 times": Mechanism(sampler=own("OneUserManyTimes")),
    "a fixed size stated as Poisson sampling": Mechanism(sampler=own("FixedSizeAsPoisson")),
}


def planted_in(folder: Path) -> Planted:
    """Return the users of a small synthetic corpus, without canaries."""
    corpus = flsim.make_corpus(
        folder / "corpus", users=USERS, test_users=1, heldout_users=1, words_per_user=20, vocabulary_size=100
    )
    return flsim.plant(corpus, flsim.Canaries(count=0))


def audited(mechanism: Mechanism, planted: Planted, canary_users: int, seed: int) -> dict[str, bool]:
    """Train with a mechanism, audit, and return whether each method of `METHODS` refutes the ledger."""
    privacy = flsim.Privacy("dp", clip=0.5, noise_multiplier=NOISE, noise=mechanism.noise)
    algorithm = flsim.FedAvg(
        COHORT,
        algorithm=own("OneByOne"),
        sampler=mechanism.sampler,
        local=flsim.LocalSGD(batch_size=4),
        privacy=privacy,
        canary_users=flsim.CanaryUsers(canary_users, canary_coins=True),
        shards=1,
    )
    with mechanism.change():
        *_, last = flsim.simulate(planted, MODEL, algorithm, ROUNDS, seed=seed, every=ROUNDS)
    rows = flsim.audit_simulation(last, planted, MODEL, algorithm, seed=seed).set_index("method")["refuted"]
    return {name: bool(rows[method]) for name, method in METHODS.items()}


def detections(repetitions: int, canary_users: int) -> dict[str, dict[str, int]]:
    """Return in how many repetitions each method refutes the ledger, by mechanism."""
    refutations = {name: dict.fromkeys(METHODS, 0) for name in MECHANISMS}
    with TemporaryDirectory() as folder, progress("audits", repetitions * len(MECHANISMS), unit="runs") as advance:
        planted, done = planted_in(Path(folder)), 0
        for seed in range(repetitions):
            for name, mechanism in MECHANISMS.items():
                for method, is_refuted in audited(mechanism, planted, canary_users, seed).items():
                    refutations[name][method] += is_refuted
                done += 1
                advance(done)
    return refutations


def bench_detection(repetitions: int, canary_users: int) -> dict[str, Any]:
    """Return the settings, and for each mechanism in how many repetitions each method refutes the ledger."""
    mechanisms = detections(repetitions, canary_users)
    return {"repetitions": repetitions, "canary_users": canary_users, "mechanisms": mechanisms}


def describe(measured: Mapping[str, Any]) -> str:
    """Return what `bench_detection` measured as a table in Markdown, with 95% intervals in percent."""
    repetitions = measured["repetitions"]
    lines = [f"| mechanism | {' | '.join(METHODS)} |", f"|---|{'---:|' * len(METHODS)}"]
    for name, refutations in measured["mechanisms"].items():
        cells = [
            f"{count} ({100 * low:.0f}-{100 * high:.0f}%)"
            for count in refutations.values()
            for low, high in [share_interval(count, repetitions)]
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
