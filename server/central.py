"""A central run, without Flower: training and the evaluation beside it are on Ray; this process looks after them."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

from flsim.checkpoint import checkpoint_name
from flsim.config import CentralSystemHParams
from flsim.errors import RunFailed
from flsim.privacy import report
from flsim.progress import progress, say
from flsim.runs import Run
from server.attempts import attempt, refuse_what_does_not_fit
from server.cluster import cluster, nodes
from server.steps import Lost, News, opened
from server.supervision import Evaluations, supervised
from server.together import STORAGE

EVALUATION_SHARE = 0.05  # of a GPU: Ray counts nothing else on it, and the evaluation leaves most of it to the training


def simulate(run: Run, address: str | None = None, cpus: int | None = None) -> None:
    """Train a run from its newest checkpoint to its last step, and wait for its evaluations.

    Args:
        run: the run; its status, checkpoints, rows and log are kept up to date.
        address: of a Ray cluster that runs already ("auto" finds it); a local one is started where this is None.
        cpus: cores of the local one; all where this is None.

    Raises:
        InputError: no cluster at that address, none that the training fits on, or what `opened` refuses.
        Diverged: values that are not finite; names the step and the last good checkpoint.
        RunFailed: training or an evaluation failed, or an interrupt from the keyboard.
    """
    opened(run)
    gpus, evaluation_gpus = gpu_shares(run.central.system)
    with cluster(address, cpus):
        refuse_what_does_not_fit(run.central.system, gpus, nodes())
        with supervised(run, evaluation_gpus) as evaluations:
            train_on_ray(run, gpus, evaluations)


def gpu_shares(system: CentralSystemHParams) -> tuple[float, float]:
    """GPUs of a training process and of an evaluator: by default a process fills a GPU together with its evaluators."""
    is_on_gpu = system.device == "cuda"
    training, evaluation = system.gpus, system.gpus_for_evaluation
    if evaluation is None:
        evaluation = EVALUATION_SHARE if is_on_gpu else 0.0
    if training is None:
        left = 1.0 - evaluation * system.evaluators
        training = left if is_on_gpu and left > 0 else float(is_on_gpu)
    return training, evaluation


def train_on_ray(run: Run, gpus: float, evaluations: Evaluations) -> None:
    """All attempts: where a process dies, training starts again from the newest checkpoint, after 1, 2, 4, ... seconds.

    Args:
        run: the run.
        gpus: of each process that trains.
        evaluations: of the run.

    Raises:
        RunFailed: processes died `system.retries` + 1 times without a checkpoint in between.
    """
    failures, retries = 0, run.central.system.retries
    while True:
        evaluations.submit_unevaluated()
        try:
            for news in _attempt(run, gpus, evaluations):
                failures = 0 if news.saved else failures
            return
        except Lost as error:
            failures += 1
            if failures > retries:
                raise RunFailed(f"training failed {failures} times, last with: {error}") from error
            say(f"{run.name}: training goes on from the newest checkpoint: {error}")
            time.sleep(2.0 ** (failures - 1))


def _attempt(run: Run, gpus: float, evaluations: Evaluations) -> Iterator[News]:
    """Show what there is to know, and have checkpoints evaluated, while it trains."""
    config, spent, advance = run.config, dict[str, float](), None
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, run.path / STORAGE, ignore_errors=True)
        told = stack.enter_context(closing(attempt(run.path.resolve(), run.name, run.central.system, gpus)))
        for news in told:
            evaluations.poll()
            if news is None:
                continue
            if advance is None:  # it trains from now on
                advance = stack.enter_context(progress(run.name, run.rounds, news.step, unit="steps"))
            advance(news.step, "" if news.loss is None else f"loss {news.loss:.2f}")
            if news.saved:
                run.mark("running", evaluations.complaint)
                if run.is_evaluated_at(news.step):
                    evaluations.submit(run.path / "checkpoints" / checkpoint_name(news.step))
            spent = news.spent or spent
            if news.spent and news.saved and news.step < run.rounds:
                say(f"{run.name}: {report.note(spent, config.unit)} by step {news.step:,}")
            yield news
    if spent:
        say(f"{run.name}: {report.sentence(spent, config.sampler, run.delta, config.unit)}")
