"""Curves of cost as work grows, by name."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.bench.curves import Curve
from flsim.bench.evaluation_curves import canaries_curve, references_curve
from flsim.bench.round_curves import (
    PROCESSORS,
    cohort_curve,
    measure_rounds,
    nodes_curve,
    population_curve,
    shards_curve,
    shared_corpus,
)
from flsim.bench.rounds import BenchHParams

CURVES: Mapping[str, tuple[Callable[[Sequence[int]], Curve], tuple[int, ...]]] = {
    "cohort": (cohort_curve, tuple(128 * 2**k for k in range(6))),
    "population": (population_curve, tuple(62_500 * 2**k for k in range(7))),
    "shards": (shards_curve, tuple(2**k for k in range(7))),
    "nodes": (nodes_curve, tuple(2**k for k in range(5))),
    "canaries": (canaries_curve, tuple(4 * 2**k for k in range(5))),
    "references": (references_curve, tuple(2**k for k in range(14, 19))),
}
USERS = BenchHParams(users=8 * PROCESSORS, rounds=4)  # of the paper's model and users


def refuse_unknown_curves(names: Iterable[str]) -> None:
    """Raise InputError for the first name that is no curve."""
    for name in names:
        if name not in CURVES:
            raise InputError(f"--curve {name}: no such curve; choose from {', '.join(CURVES)}")


def measure_curves(names: Iterable[str], sizes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Curve]:
    """Measure curves, each once, in the order of `CURVES`.

    Args:
        names: keys of `CURVES`.
        sizes: sizes by name, where they are not those of `CURVES`.

    Raises:
        InputError: there is no such curve.
    """
    chosen = set(names)
    refuse_unknown_curves(chosen)
    return {
        name: measure((sizes or {}).get(name, usual)) for name, (measure, usual) in CURVES.items() if name in chosen
    }


def measure_users_per_second(hparams: BenchHParams = USERS) -> float:
    """Return the users that a client process trains in a second, from rounds with a client process per processor."""
    say("users per second of a client process")
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as name:
        corpus = shared_corpus(Path(name) / "corpus", hparams)
        costs = measure_rounds(Path(name) / "run", corpus, hparams, hparams.users, PROCESSORS)
    return -(-hparams.users // PROCESSORS) / (costs["round_seconds"] - costs["overhead_seconds"])
