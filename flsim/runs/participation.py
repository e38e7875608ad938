"""The rounds in which training met a canary, as a data frame."""

import numpy as np
import pandas as pd

from flsim.runs.config.participation import of_extra
from flsim.runs.folder import Run


def participation(run: Run, rounds: int) -> pd.DataFrame:
    """Return each time that a sharer of a canary took part in a run's first rounds.

    In central training, this is each time that a copy was read. A sharer is a user who holds a copy; in the IID twin, a
    synthetic user; of an injected canary, a pseudo-user, whose number is that of users or larger. A sharer that took
    part read all its copies, unless local.max_records limited it to some of its records.

    Returns:
        Columns ``round`` (the first is 1), ``canary`` (its id) and ``user``; a row for each round and sharer (central
        training: step and copy), ordered by round, canary and user.
    """
    at, canary, user = run.config.meetings(run.users, rounds)
    extra = of_extra(run.users, rounds, is_by_copy=run.config.unit == "record")
    is_planted = run.users.is_planted_in(canary, at)
    met = (values[is_planted] for values in (at, canary, user))
    at, canary, user = (np.concatenate(pair) for pair in zip(met, extra, strict=True))
    ids = np.array([canary.id for canary in run.canaries], object)
    order = np.lexsort((user, canary, at))
    return pd.DataFrame({"round": at[order], "canary": ids[canary[order]], "user": user[order]})
