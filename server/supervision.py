"""A run while it is trained: its checkpoints are evaluated meanwhile, and run.json says how it ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from flsim import checkpoint
from flsim.checkpoint import State
from flsim.errors import Diverged, RunFailed
from flsim.evaluation.service import EvaluationService
from flsim.progress import progress, say
from flsim.runs import Run, evaluate_checkpoint

EVALUATION_DEADLINE = 24 * 3600.0  # seconds to wait, after the last round, for what is still being evaluated


@contextmanager
def supervised(run: Run, evaluation_gpus: float = 0.0) -> Iterator[EvaluationService]:
    """Train in the block, from the run's newest checkpoint, and give each that `keep` saves to the evaluation.

    Checkpoints that are due and have no rows yet are evaluated first. The end of the block waits for all evaluations.

    Args:
        run: its status is kept up to date; lines of its log beyond the newest checkpoint are dropped.
        evaluation_gpus: GPUs of the evaluator; 0 evaluates on a CPU.

    Raises:
        Diverged: values that are not finite; names the round and the last good checkpoint.
        RunFailed: an evaluation failed, or the block did.
    """
    device = "cuda" if evaluation_gpus else "cpu"
    evaluation = EvaluationService(partial(evaluate_checkpoint, run.path.resolve(), device=device), evaluation_gpus)
    newest = checkpoint.latest(run.path / "checkpoints")
    run.forget_rounds_after(checkpoint.round_of(newest) if newest else 0)
    try:
        for path in run.unevaluated():
            evaluation.submit(path.resolve())
        yield evaluation
        finish_evaluations(run, evaluation)
    except Diverged as error:
        with suppress(RunFailed):
            evaluation.drain(EVALUATION_DEADLINE)  # what was good before still counts
        newest = checkpoint.latest(run.path / "checkpoints")
        reason = f"{error}; last good checkpoint: {newest or 'none'}"
        run.mark("diverged", reason)
        raise Diverged(reason) from error
    except BaseException as error:
        run.mark("failed", "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or repr(error))
        raise
    finally:
        evaluation.close()
    run.mark("completed")


def keep(run: Run, state: State, evaluation: EvaluationService) -> None:
    """Save a state, and have it evaluated where that is due. Training goes on meanwhile, and if evaluation fails."""
    path = run.save(state)
    run.mark("running")
    if run.is_evaluated_at(state.round):
        evaluation.submit(path.resolve())


def go_on_without(look: Callable[[], object]) -> None:
    """Evaluation never feeds the loop: one that failed is said, and training goes on."""
    try:
        look()
    except Diverged:
        raise
    except RunFailed as error:
        say(str(error))


def finish_evaluations(run: Run, evaluation: EvaluationService) -> None:
    """Wait for what is still being evaluated.

    Raises:
        Diverged: as `EvaluationService.drain`.
        RunFailed: evaluations failed, now or during training; `--resume` does them again.
    """
    with progress(f"{run.name}: evaluating", total=1) as advance:
        until = time.monotonic() + EVALUATION_DEADLINE
        while evaluation.pending and time.monotonic() < until:
            go_on_without(partial(evaluation.drain, until - time.monotonic()))
        advance(1)
    missing = run.unevaluated()
    if missing:
        raise RunFailed(f"{missing[0].name} could not be evaluated; `flsim run --resume` tries again")
