"""Updates of canary users in a sum: each passes through the clip that real users' updates pass through."""

from numpy import int64
from numpy.typing import NDArray

from flsim.models.language_model import Params
from flsim.privacy.update_canaries import update_of
from flsim.training.update import UpdateSum


def with_canaries(total: Params, users: NDArray[int64], seed: int, clip: float) -> Params:
    """Return a sum of clipped updates with those of canary users, which `UpdateSum.of_user` clips.

    Args:
        total: sum of the real users' updates, float64 by parameter; it is not changed.
        users: int64 [n], the canary users of the round; one that is drawn twice counts twice.
        seed: the experiment's seed.
        clip: S of the round.
    """
    if not len(users):
        return total
    total = {name: value.clone() for name, value in total.items()}
    for canary in users.tolist():
        sent = UpdateSum.of_user(update_of(canary, seed, clip, total), 0, 0.0, 0, clip)
        for name, value in sent.delta.items():
            total[name].add_(value)
    return total
