"""A central run: records in this process, without Flower; only the evaluation beside it is on Ray."""

import time

import torch

from flsim.central import CentralState, CentralTraining, train_central
from flsim.config import CentralSystemHParams
from flsim.errors import InputError
from flsim.privacy import report
from flsim.progress import say
from flsim.runs import Run
from server.cluster import cluster
from server.supervision import Evaluations, keep, supervised

EVALUATION_SHARE = 0.05  # of a GPU: Ray counts nothing else on it, and the evaluation leaves most of it to the training


def simulate(run: Run, address: str | None = None) -> None:
    """Train a run from its newest checkpoint to its last step, and wait for its evaluations.

    Args:
        run: the run; its status, checkpoints, rows and log are kept up to date.
        address: of a Ray cluster that runs already ("auto" finds it), to evaluate on; else a local one is started.

    Raises:
        InputError: no cluster at that address, or what `Run.central_training` refuses.
        Diverged: values that are not finite; names the step and the last good checkpoint.
        RunFailed: an evaluation failed, or an interrupt from the keyboard.
    """
    system, training, state = run.central.system, run.central_training(), run.latest_state()
    if not isinstance(state, CentralState):
        raise InputError(f"{run.path}: its newest checkpoint is of federated training; start a new run")
    torch.set_num_threads(system.threads)
    with cluster(address), supervised(run, evaluation_gpus(system)) as evaluations:
        train_steps(run, state, training, evaluations)


def evaluation_gpus(system: CentralSystemHParams) -> float:
    """GPUs of an evaluator: by default it follows the training."""
    if system.gpus_for_evaluation is None:
        return EVALUATION_SHARE if system.device == "cuda" else 0.0
    return system.gpus_for_evaluation


def train_steps(run: Run, state: CentralState, training: CentralTraining, evaluations: Evaluations) -> CentralState:
    """All steps from `state` on; every state that is saved has a line in the log, about the steps since the last."""
    began, spent = time.monotonic(), run.epsilons(state)
    for state, log in train_central(state, training, run.rounds, run.is_saved_at, run.name):  # noqa: B020
        evaluated = run.is_evaluated_at(state.step)
        if evaluated:  # accounting takes a second or so
            spent = run.epsilons(state)
        now = time.monotonic()
        run.log_round(
            round=state.step,
            loss=log.loss / log.tokens if log.tokens else None,
            records=log.records,
            record_epsilon=spent if evaluated and spent else None,
            seconds=round(now - began, 3),
        )
        began = now
        keep(run, state, evaluations)
        evaluations.poll()
        if evaluated and spent and state.step < run.rounds:
            say(f"{run.name}: {report.note(spent, run.config.unit)} by step {state.step:,}")
    if spent:
        say(f"{run.name}: {report.sentence(spent, run.config.sampler, run.delta, run.config.unit)}")
    return state
