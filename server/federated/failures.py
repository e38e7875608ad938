"""The cause of a shard's repeated failure: a changed file, a user that no client can train, or neither."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flsim.algorithms.rounds import RoundRequest
from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import parts
from flsim.base.progress import say
from flsim.runs.config.own_code import names_in
from flsim.runs.folder import Run

WITNESSES = 3  # users that are tried beside the one that fails alone
Ask = Callable[[RoundRequest], dict[int, str]]


class ShardFailed(RunFailed):
    """A shard failed in all attempts, or in one by a user's own code, which would fail again.

    Attributes:
        request: the request to the shard.
        is_own_code: whether an error of a user's own code is the reason.
    """

    def __init__(self, request: RoundRequest, times: int, reason: str, is_own_code: bool = False) -> None:
        failed = "failed with" if is_own_code else f"failed {times} times, last with"
        super().__init__(f"round {request.round + 1}: shard {request.shard} {failed}: {reason}")
        self.request, self.is_own_code = request, is_own_code


def explain(run: Run, failed: ShardFailed, ask: Ask) -> RunFailed:
    """Return the error to raise for a shard that keeps failing.

    Args:
        run: the run.
        failed: the shard's request, and how it failed.
        ask: function that makes one attempt at a request and returns the reasons of failure, by shard.
    """
    try:
        run.verify()
    except InputError as error:
        file, _, _ = str(error).partition(": ")
        return RunFailed(str(failed) if f"{file}: " in str(failed) else f"{failed}; {error}")
    if failed.is_own_code or any(f"{parts(name)[0]}:" in str(failed) for name in names_in(run.config)):
        return RunFailed(str(failed))  # an error of the user's own code, which no single user of the population causes
    about = {"round": failed.request.round + 1, "shard": failed.request.shard}
    say(f"{run.name}: {failed}; searching for the user whose records cause it", **about)

    def fails(users: Sequence[int]) -> bool:
        return bool(ask(replace(failed.request, users=failed.request.users[list(users)])))

    place = culprit(range(len(failed.request.users)), fails)
    if place is None:
        return RunFailed(f"{failed}; no single one of its users is the cause; `flsim run --resume` tries again")
    user = int(failed.request.users[place])
    others = others_than(user, failed.request.users.tolist(), len(run.users))
    if all(ask(replace(failed.request, users=np.array([other]))) for other in others):
        return RunFailed(f"{failed}; other users alone fail it too, so the cause is none of them")
    return RunFailed(
        f"{failed}; user {user} ({run.users.name(user)}) alone fails it too: leave that user out of the corpus, "
        f"or give clients more memory"
    )


def others_than(user: int, cohort: Sequence[int], population: int) -> list[int]:
    """Return a few other users: of the cohort, or of the population where the cohort has no other.

    A user who fails alone is to blame only if one of them passes.

    >>> others_than(5, [2, 5, 7, 9, 11], 40)
    [2, 7, 9]
    >>> others_than(39, [39], 40)
    [0, 1, 2]
    """
    others = [other for other in cohort if other != user]
    neighbours = [(user + step) % population for step in range(1, min(1 + WITNESSES, population))]
    return (others or neighbours)[:WITNESSES]


def culprit(users: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> int | None:
    """Return one of `users` that fails on its own, by halving; None where there is none, or where no user fails too.

    >>> culprit(range(8), lambda users: 5 in users)
    5
    """
    if fails([]):
        return None
    while len(users) > 1:
        half = users[: len(users) // 2]
        users = half if fails(half) else users[len(half) :]
    return users[0] if users and fails(users) else None
