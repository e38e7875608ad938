"""The launch of a central run, without Flower, on Ray or in this process."""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flsim.algorithms.checkpoint import checkpoint_name, digest_of
from flsim.base.errors import InputError, Interrupted, RunFailed, is_out_of_memory
from flsim.base.extensions import custom_code_errors
from flsim.base.logs import logging_to
from flsim.base.progress import progress, say
from flsim.privacy import ledger
from flsim.runs import roundlog
from flsim.runs.config import CentralSystemHParams
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from flsim.runs.recovery import DRIVEN, hold_lock, recover
from flsim.training.central import CentralTraining, Log
from flsim.training.central.training import train_chunks
from flsim.training.update import State
from server.cluster.causes import death
from server.cluster.nodes import Nodes
from server.cluster.start import cluster, nodes, say_where
from server.pool.evaluations import EvaluationInProcess, gpu_shares
from server.stopping import Stop, StopFile, stopping
from server.supervision import Evaluations, RoundMetrics, supervised

NEWS_EVERY = 0.5  # seconds between two progress reports


class Lost(Exception):  # noqa: N818 (an outcome)
    """The loss of a training process; the run can be resumed from its newest checkpoint."""


@dataclass(frozen=True)
class News:
    """Progress of the training process, for the driver."""

    step: int  # number of completed steps
    loss: float | None = None  # nats per position, since the last report
    saved: bool = False  # whether there is a checkpoint of this step
    # epsilons by the name of the convention, if they were computed
    spent: dict[str, float] = field(default_factory=dict)


def train(path: Path, gpus: float) -> Generator[News]:
    """Train a run in this process, with a share of a GPU, from its newest checkpoint; yield reports for the driver."""
    run, stop = Run.open(path), StopFile(path)
    system = run.central.system
    torch.set_num_threads(system.threads)
    if system.device == "cuda":
        if not torch.cuda.is_available():
            raise InputError('system.device is "cuda", but torch finds no GPU on the node that Ray chose')
        torch.cuda.set_per_process_memory_fraction(min(gpus, 1.0))
    with hold_lock(run), custom_code_errors():
        training, state = opened(run)
        chunks = train_chunks(state, training, run.rounds, run.is_saved_at, ends_early=stop)
        yield from written(run, state, chunks)


def opened(run: Run) -> tuple[CentralTraining, State]:
    """Return a central run's training and the state to continue from; raise InputError if it cannot be trained."""
    return run.central.training_of(run.users, run.rounds), run.latest_state()


def written(run: Run, state: State, chunks: Iterable[tuple[int, Log, State | None]]) -> Iterator[News]:
    """Save and log the training from `state` on, with a line for each saved state; Interrupted if it ended early."""
    roundlog.settle(run.path, state.round, run.config.has_a_line_per_round)
    spent, metrics = run.epsilons(state), RoundMetrics(run)
    yield News(state.round, spent=spent)
    log, unsaid, since = Log(), Log(), state.round
    began = last = time.monotonic()
    for step, new, reached in chunks:
        log, unsaid = log.merge(new), unsaid.merge(new)
        if reached is None and time.monotonic() - last < NEWS_EVERY:
            continue
        evaluated = reached is not None and run.is_evaluated_at(step)
        if reached is not None:
            if evaluated:  # otherwise accounting, which takes about a second, is skipped
                spent = run.epsilons(reached)
            line = run.log_round(
                round=step,
                since=since,
                loss=_mean(log),
                records=log.records,
                record_epsilon=spent if evaluated and spent else None,
                seconds=round(time.monotonic() - began, 3),
                digest=digest_of(reached),
            )
            metrics.report(line)
            run.save(reached)
            log, since = Log(), step
        yield News(step, _mean(unsaid), reached is not None, spent if evaluated else {})
        if reached is not None:
            began = time.monotonic()  # without an evaluation in this process
        unsaid, last = Log(), time.monotonic()
    if since < run.rounds:
        raise Interrupted


def _mean(log: Log) -> float | None:
    return log.loss / log.tokens if log.tokens else None


ITEM_WAIT = 0.2  # seconds between two items of the iterator
PATIENCE = 3.0  # seconds until a message reports that other programs use the resources of the training


def simulate(
    run: Run, address: str | None = None, cpus: int | None = None, head: str | None = None, retrain_lost: bool = False
) -> None:
    """Train a run on Ray in a separate process; for arguments and errors, see `server.launch.train`."""
    with _driven(run) as (stop, stop_file):
        gpus, evaluation_gpus = process_gpu_shares(run.central.system)
        with cluster(address, cpus, head), stopping(stop):
            Nodes(run.path, run.config.data.corpus, is_local=address is None and head is None).check()
            refuse_what_does_not_fit(run.central.system, gpus, nodes())
            say_where(run.path, address is None and head is None)
            _begin(run, retrain_lost)
            with supervised(run, evaluation_gpus, stop=stop) as evaluations:
                train_on_ray(run, gpus, evaluations, stop, stop_file)


def simulate_in_process(run: Run, retrain_lost: bool = False) -> None:
    """Train like `simulate`, in this process without Ray; each checkpoint is evaluated before training continues."""
    if not run.central.system.is_one_process:
        raise InputError('--in-process needs a CPU; set system.device = "cpu"')
    with _driven(run) as (stop, stop_file), stopping(stop):
        _begin(run, retrain_lost)
        service = EvaluationInProcess(run.path.resolve(), evaluate_checkpoint)
        with supervised(run, service=service, stop=stop) as evaluations:
            for _ in _followed(run, train(run.path, 0.0), evaluations, stop, stop_file):
                pass


@contextmanager
def _driven(run: Run) -> Iterator[tuple[Stop, StopFile]]:
    """Lock and check the run without changing it; yield the requests to end, of which no file remains."""
    stop_file = StopFile(run.path)
    with hold_lock(run, DRIVEN), logging_to(run.path):
        run.central.training_of(run.users, run.rounds)
        stop_file.remove()
        try:
            yield Stop(), stop_file
        finally:
            stop_file.remove()


def _begin(run: Run, retrain_lost: bool) -> None:
    """Record the settings and recover the run, after all checks have passed."""
    with hold_lock(run):  # a trainer whose driver died can still write
        run.record()
        recover(run, retrain_lost)
    opened(run)


def process_gpu_shares(system: CentralSystemHParams) -> tuple[float, float]:
    return gpu_shares(system.gpus, system.gpus_for_evaluation, system.evaluators, system.device == "cuda")


def train_on_ray(run: Run, gpus: float, evaluations: Evaluations, stop: Stop, stop_file: StopFile) -> None:
    """Train; if a process dies, restart from the newest checkpoint after 1, 2, 4, ... s; RunFailed after `retries`."""
    failures, retries = 0, run.central.system.retries
    while True:
        evaluations.submit_unevaluated()
        try:
            for news in _followed(run, attempt(run, gpus), evaluations, stop, stop_file):
                failures = 0 if news.saved else failures
            return
        except Interrupted:
            stop.check()
            raise
        except Lost as error:
            stop.check()
            failures += 1
            if failures > retries:
                raise RunFailed(f"training failed {failures} times, last with: {error}") from error
            say(f"{run.name}: training restarts from the newest checkpoint: {error}", failure="training lost")
            stop.wait(2.0 ** (failures - 1))
            stop.check()


def attempt(run: Run, gpus: float) -> Generator[News | None]:
    """Train a run in one task on the Ray cluster; yield its reports, and regularly None; closing ends the training.

    Raises the error of training, or Lost if the process died or ran out of memory, after a valid checkpoint.
    """
    system = run.central.system
    group = placement_group([{"CPU": float(system.threads)} | ({"GPU": gpus} if gpus else {})])
    stream = None
    try:
        waited, patience = 0.0, PATIENCE
        while not group.wait(ITEM_WAIT):
            waited += ITEM_WAIT
            if waited >= patience:
                say(f"{run.name}: waiting for {_in_words(system, gpus)}")
                patience = float("inf")
            yield None
        task = ray.remote(train).options(
            num_cpus=system.threads,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            num_returns="streaming",
            max_retries=0,
        )
        stream = task.remote(run.path.resolve(), gpus)
        while True:
            if not ray.wait([stream], timeout=ITEM_WAIT)[0]:
                yield None
                continue
            try:
                news = ray.get(next(stream))
            except StopIteration:
                return
            yield news
    except RayTaskError as error:
        if error.cause and is_out_of_memory(error.cause):
            raise Lost(f"{type(error.cause).__name__}: {error.cause}") from error
        raise (error.cause or error) from error
    except RayError as error:
        raise Lost(death(error)) from error
    finally:
        if stream is not None:
            ray.cancel(stream, force=True)
        remove_placement_group(group)


def refuse_what_does_not_fit(system: CentralSystemHParams, gpus: float, nodes: list[dict[str, float]]) -> None:
    """Raise InputError if the training could never start on nodes with these resources."""
    if gpus and not any(node.get("GPU") for node in nodes):
        raise InputError('system.device is "cuda", but no Ray node has a GPU; set system.device = "cpu"')
    if not any(node.get("CPU", 0) >= system.threads and node.get("GPU", 0) >= gpus for node in nodes):
        raise InputError(
            f"training needs {_in_words(system, gpus)}, but no Ray node has these resources; lower "
            "system.threads or system.gpus"
        )


def _in_words(system: CentralSystemHParams, gpus: float) -> str:
    return f"{system.threads} CPU{'s' * (system.threads != 1)}" + (f" and {gpus:g} GPUs" if gpus else "")


def _followed(
    run: Run, told: Generator[News | None], evaluations: Evaluations, stop: Stop, stop_file: StopFile
) -> Iterator[News]:
    """Yield the reports of an attempt with a progress display, and submit its checkpoints to the evaluation."""
    config, spent, advance = run.config, dict[str, float](), None
    with ExitStack() as stack:
        for news in stack.enter_context(closing(told)):
            if stop.is_set():
                if advance is None:  # nothing is trained yet, so there is nothing to save
                    stop.check()
                stop_file.write()
            evaluations.poll()
            if news is None:
                continue
            if advance is None:  # the first report: training has started
                advance = stack.enter_context(progress(run.name, run.rounds, news.step, unit="steps"))
            advance(news.step, "" if news.loss is None else f"loss {news.loss:.2f}")
            if news.saved:
                evaluations.saved(run.path / "checkpoints" / checkpoint_name(news.step))
            spent = news.spent or spent
            if news.spent and news.saved and news.step < run.rounds:
                say(f"{run.name}: {ledger.note(spent, config.unit)} by step {news.step:,}")
            yield news
    if spent:
        say(f"{run.name}: {ledger.sentence(spent, config.sampler, run.delta, config.unit)}")
