"""Attacks by shadow models on the runs of folders, with rows in the folder of each attacked run."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from flsim.attacks.membership.attacked import Attacked, AttackHParams
from flsim.attacks.membership.inference import allowed, claimed
from flsim.attacks.membership.inference import success as success_of_run
from flsim.attacks.membership.shadows import LOSS, Shadows, collect, counterfactual, leave_one_out, success
from flsim.attacks.membership.stored import FOLDER
from flsim.base.files import refuse_unwritable
from flsim.results.seeds import named_apart
from flsim.results.sweeps import expanded, run_folders


def infer_by_shadows(
    *runs: Path | str, records: int = 1_000, round: int | None = None, device: str = "cpu"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Attack runs with each other as shadow models, as `flsim membership --shadows` does, and store rows in the runs.

    Args:
        runs: folders of runs with `data.shadow` and of sweeps of them; runs that differ in their seeds alone attack
            each other, at least 4.
        records: largest number of targets, which are users or records, and of others that no run was trained on.
        round: round of the attacked checkpoints; the newest one of each run if not given.
        device: torch device, such as "cuda".

    Returns:
        The rows of `flsim.attacks.membership.shadows.success`, a row for each setting and attack; and those of
        `flsim.attacks.membership.shadows.counterfactual`, a row for each setting and target. Both begin with
        ``setting`` and ``unit``.

    Raises:
        InputError: there is no such run or checkpoint, or runs are no shadow models of each other.

    Examples:
        >>> attacks, targets = flsim.infer_by_shadows("runs/shadows-demo")                     # doctest: +SKIP
        >>> targets.sort_values("memorization").tail()                                         # doctest: +SKIP
    """
    paths = run_folders(expanded(runs))
    attacks, targets = [], []
    for setting, of_setting, of_targets in by_setting(paths, AttackHParams(records, round, device=device)):
        attacks.append(of_setting.assign(setting=setting))
        targets.append(of_targets.assign(setting=setting, unit=of_setting["unit"].iloc[0]))
    first = ["setting", "unit"]
    every, of_every = (pd.concat(tables, ignore_index=True) for tables in (attacks, targets))
    return every.set_index(first).reset_index(), of_every.set_index(first).reset_index()


def by_setting(paths: Sequence[Path], hparams: AttackHParams) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Yield each setting with its two tables, as `infer_by_shadows` has them, and store rows in its runs' folders.

    Raises:
        InputError: as for `infer_by_shadows`.
    """
    names, series = named_apart(paths), dict[str, list[Path]]()
    for path in paths:
        series.setdefault(names[path]["series"], []).append(path)
    for path in paths:
        refuse_unwritable(path, FOLDER)
    for alike in series.values():
        shadows = collect(alike, hparams.count, hparams.round, hparams.device)
        store(alike, shadows, hparams)
        yield names[alike[0]]["setting"], success(shadows), counterfactual(shadows)


def store(paths: Sequence[Path], shadows: Shadows, hparams: AttackHParams) -> dict[Path, pd.DataFrame]:
    """Store how well LiRA and RMIA tell the targets of each run, and return the rows by run folder.

    Intervals resample targets, which have no author here: coins decided about each by itself. A ledger of users is not
    held against targets that are users, whose presence is more than the replacement of what they hold.

    Args:
        paths: the run folders whose scores `shadows` has, in its order.
        shadows: the scores, from `flsim.attacks.membership.shadows.collect`.
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
                row = success_of_run(name, shadows.unit, *of_run, attacked.run.config.seed, allows)
                rows.append(row | claimed(claim, protects))
        if rows:
            stored[path] = attacked.stored(rows, ())
    return stored
