"""The start of a run from the checkpoints of the other arm before the first window, until which both arms are equal."""

import json
from dataclasses import replace

from flsim.algorithms import checkpoint, micro_cohorts
from flsim.base.errors import InputError
from flsim.base.files import new_file, read_lines
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.results.rows import copy_rows, rows_in
from flsim.results.store import log_evaluation, read_evaluations
from flsim.runs import roundlog
from flsim.runs.config.base import settings_of_both
from flsim.runs.folder import Run
from flsim.runs.recovery import hold_lock


def begin_from(run: Run, twin: Run) -> Run:
    """Copy the common checkpoints, rounds and rows of the other arm to a new run.

    If the twin has not trained all common rounds, or lacks a checkpoint that this run evaluates, only the earlier
    rounds are copied. InputError if the run has started, the other differs in more than `canaries.arm` and the use of
    machines, or its files are damaged.
    """
    _refuse_other_runs(run, twin)
    run = replace(run, config=run.config.resuming(twin.config))
    with hold_lock(run):
        _refuse_other_runs(run, twin)  # another process may have trained the run in the meantime
        run.record()
        _take_over(run, twin)
    return run


def _take_over(run: Run, twin: Run) -> None:
    stored = {checkpoint.round_of(path): path for path in checkpoint.all_in(twin.path / "checkpoints")}
    due = (round_ for round_ in range(1, run.parting + 1) if run.is_evaluated_at(round_))
    end = next((round_ for round_ in due if round_ not in stored), run.parting + 1)
    files = [path for round_, path in stored.items() if round_ < end]
    if not files:
        say(f"{run.name}: starts from the beginning, because {twin.name} has no checkpoint up to round {run.parting:,}")
        return
    reached = checkpoint.round_of(files[-1])
    roundlog.copy(twin.path, run.path, reached)
    sizes = [line for line in read_lines(twin.path / micro_cohorts.FILE) if micro_cohorts.is_line(line)]
    if common := [line for line in sizes if line.get("round", 0) < reached]:
        with new_file(run.path / micro_cohorts.FILE) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in common), encoding="utf-8")
    names = {path.name for path in files if run.is_evaluated_at(checkpoint.round_of(path))}
    for attempt in read_evaluations(twin.path):
        if attempt.checkpoint in names:
            log_evaluation(run.path, attempt)
    for path in rows_in(twin.path):
        if f"{path.stem}{checkpoint.SUFFIX}" in names:
            copy_rows(path, run.path, run.identity)
    for path in files:  # the newest is copied last, because training continues from it and needs all other files
        if path == files[-1] or run.is_kept_at(checkpoint.round_of(path)):
            run.save(twin.load(path))
    run.mark("running")
    say(f"{run.name}: starts with the first {reached:,} of {run.rounds:,} rounds of {twin.name}", round=reached)
    log.info("started from the other arm", extra={"run": twin.name, "rounds": reached})


def _refuse_other_runs(run: Run, twin: Run) -> None:
    if run.last_round or checkpoint.latest(run.path / "checkpoints"):
        raise InputError(f"{run.path}: this run has already started without another run; remove --begin-from")
    if run.config.canaries.arm == twin.config.canaries.arm:
        raise InputError(
            f"{twin.path}: is of arm {twin.config.canaries.arm.upper()} and so is this run; name a run of the other arm"
        )
    if settings_of_both(run.config) != settings_of_both(twin.config):
        raise InputError(
            f"{twin.path}: differs from this run in more settings than canaries.arm; name a run that differs only "
            "in canaries.arm"
        )
    if run.rounds != twin.rounds:  # schedules of learning rates and windows in fractions depend on it
        raise InputError(
            f"{twin.path}: trains {twin.rounds:,} rounds, and this run {run.rounds:,}; name a run with the "
            "same number of rounds"
        )
    if run.corpus.digest != twin.corpus.digest:
        raise InputError(f"{twin.path}: was trained on another corpus; name a run on the corpus of this run")
