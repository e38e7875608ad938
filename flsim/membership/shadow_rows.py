"""Rows of attacks by shadow models in the folder of each attacked run, beside those of attacks on that run alone."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from flsim.membership.attacked import Attacked, AttackHParams
from flsim.membership.inference import allowed, claimed, success
from flsim.membership.shadows import LOSS, Shadows, leave_one_out


def store(paths: Sequence[Path], shadows: Shadows, hparams: AttackHParams) -> dict[Path, pd.DataFrame]:
    """Store how well LiRA and RMIA tell the targets of each run, and return the rows by run folder.

    Intervals resample targets, which have no author here: coins decided about each by itself. A ledger of users is not
    held against targets that are users, whose presence is more than the replacement of what they hold.

    Args:
        paths: the run folders whose scores `shadows` has, in its order.
        shadows: the scores, from `flsim.membership.shadows.collect`.
        hparams: the settings that they were collected with.
    """
    scores, targets, stored = leave_one_out(shadows), np.array(shadows.targets, object), {}
    for index, path in enumerate(paths):
        attacked = Attacked.open(path, hparams)
        claim, protects = attacked.claim if shadows.unit == "record" else None, attacked.run.config.unit
        allows, rows = partial(allowed, claim, protects), []
        for name in (name for name in scores if name != LOSS):  # the loss is an attack on a run alone
            known = np.isfinite(scores[name][index])
            is_in = shadows.is_in[index, known]
            if is_in.any() and not is_in.all():
                of_run = scores[name][index, known], is_in, targets[known]
                row = success(name, shadows.unit, *of_run, attacked.run.config.seed, allows)
                rows.append(row | claimed(claim, protects))
        if rows:
            stored[path] = attacked.stored(rows, ())
    return stored
