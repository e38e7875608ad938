"""A central run, without Flower, on Ray or in this process, and supervision of the evaluations of any run."""

import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.metrics import Counter, Gauge
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flsim.algorithms import checkpoint
from flsim.algorithms.checkpoint import checkpoint_name, digest_of
from flsim.base.errors import Diverged, InputError, Interrupted, RunFailed, is_out_of_memory
from flsim.base.extensions import custom_code_errors
from flsim.base.logs import log, logging_to
from flsim.base.progress import progress, say
from flsim.base.terminal import console
from flsim.privacy import ledger
from flsim.results.rows import Evaluation, failures, read_run, read_run_file, round_in_short
from flsim.runs import roundlog
from flsim.runs.config import CentralSystemHParams
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.runs.recovery import DRIVEN, hold_lock, recover
from flsim.runs.trackers import tracking
from flsim.training.central import CentralTraining, Log
from flsim.training.central.training import train_chunks
from flsim.training.update import State
from server.cluster.causes import death
from server.cluster.start import Nodes, cluster, nodes, say_where
from server.pool.grid import EvaluationInProcess, EvaluationService, ServiceHParams, gpu_shares
from server.stopping import Stop, StopFile, stopping

# The supervision of a run in training: evaluation of its checkpoints, and the record of its end in run.json.

LOOK = 0.5  # seconds between two checks whether the run must end


class Evaluations:
    """The evaluations of one run, which training does not wait for."""

    def __init__(self, run: Run, service: EvaluationService, stop: Stop | None = None) -> None:
        self._run, self._service, self._stop = run, service, stop or Stop()
        self._failed: set[str] = set()  # checkpoints that are not tried again before `--resume`

    def submit(self, path: Path) -> None:
        self._service.submit(path.resolve())

    def submit_unevaluated(self) -> None:
        """Submit all checkpoints whose evaluation is due and which have no rows."""
        for path in self._run.unevaluated():
            if path.name not in self._failed:
                self.submit(path)

    def saved(self, path: Path) -> None:
        """Record a new checkpoint, and submit it if its evaluation is due."""
        round_ = checkpoint.round_of(path)
        log.info("checkpoint", extra={"round": round_, "file": path.name})
        self._run.mark("running", self.complaint)
        if self._run.is_evaluated_at(round_):
            self.submit(path)

    def poll(self) -> None:
        """Record evaluations that ended, without waiting, and report failures; Diverged if a model is not finite."""
        self._see(self._service.poll())

    def finish(self) -> None:
        """Wait for all evaluations that are due; raise Diverged as `poll`, Interrupted, or RunFailed if some failed."""
        with progress(f"{self._run.name}: evaluating", total=1) as advance:
            while self._service.pending:
                self._stop.check()
                self._see(self._service.drain(timeout=LOOK))
            advance(1)
        results = read_run(self._run.path)
        if results.status == "diverged":
            raise Diverged(str(results.reason))
        if self.complaint or self._run.unevaluated():
            raise RunFailed(self.complaint or "some checkpoints have no rows; `flsim run --resume` evaluates them")

    def wait(self) -> None:
        """Wait for all evaluations that are due, with any outcome, or until the run must end."""
        while self._service.pending and not self._stop.is_set():
            with suppress(Diverged):
                self._see(self._service.drain(timeout=LOOK))

    @property
    def complaint(self) -> str | None:
        """Return a failed evaluation and the reason in one line; None without failures."""
        failed = failures(self._run.path)
        if not failed:
            return None
        name, reason = next(iter(failed.items()))
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        is_kept = (self._run.path / "checkpoints" / name).exists()
        what_to_do = "`flsim run --resume` tries again" if is_kept else "the checkpoint no longer exists"
        return f"{name} could not be evaluated; {what_to_do}: {reason}{more}"

    def _see(self, ended: Sequence[Evaluation]) -> None:
        failed = [evaluation for evaluation in ended if evaluation.outcome == "failed"]
        for evaluation in ended:
            round_ = checkpoint.round_of(Path(evaluation.checkpoint))
            fields = {"round": round_, "file": evaluation.checkpoint}
            log.info("evaluated", extra=fields | {"outcome": evaluation.outcome, "seconds": evaluation.seconds})
            if evaluation.outcome == "stored" and (results := round_in_short(self._run.path, round_)):
                console.print(f"{self._run.name}: evaluated after {round_:,}: {results}", markup=False, soft_wrap=True)
            if evaluation in failed:
                say(
                    f"{self._run.name}: the evaluation of {evaluation.checkpoint} failed: {evaluation.reason}", **fields
                )
        self._failed |= {evaluation.checkpoint for evaluation in failed}
        if failed and not _has_diverged(self._run):  # which `finish` reports
            self._run.mark("running", self.complaint)
        diverged = next((evaluation for evaluation in ended if evaluation.outcome == "diverged"), None)
        if diverged:
            raise Diverged(f"the evaluation of {diverged.checkpoint} failed: {diverged.reason}")


@contextmanager
def supervised(
    run: Run, evaluation_gpus: float = 0.0, service: EvaluationService | None = None, stop: Stop | None = None
) -> Iterator[Evaluations]:
    """Train in the block, from the run's newest checkpoint, and evaluate each checkpoint that it submits.

    The status of the run is kept up to date. The end of the block waits for all evaluations, on `evaluation_gpus` (0: a
    CPU), or by a `service`, and closes the service. Raises Diverged with the round and the last good checkpoint,
    Interrupted if `stop` was set, RunFailed if an evaluation or the block failed.
    """
    service = service or _service_of(run, evaluation_gpus)
    evaluations = Evaluations(run, service, stop)
    newest = checkpoint.latest(run.path / "checkpoints")
    with tracking(run.path, run.config.system.tracking, run.parameters):
        log.info("training", extra={"round": checkpoint.round_of(newest) if newest else 0, "rounds": run.rounds})
        try:
            if not _has_diverged(run):  # which `finish` reports
                run.mark("running", evaluations.complaint)
            evaluations.submit_unevaluated()
            yield evaluations
            evaluations.finish()
        except Diverged as error:
            newest = checkpoint.latest(run.path / "checkpoints")
            reason = f"{error}; last good checkpoint: {newest or 'none'}"
            run.mark("diverged", reason)  # before the wait, which a second signal or a kill can end
            log.error("diverged", extra={"reason": reason})
            evaluations.wait()  # checkpoints from before the failure are still valid
            raise Diverged(reason) from error
        except BaseException as error:
            ended = isinstance(error, (Interrupted, KeyboardInterrupt))
            reason = "`flsim run --resume` continues it" if ended else str(error) or repr(error)
            if ended:
                log.warning("interrupted")
            else:
                log.error("failed", extra={"reason": reason})
            with suppress(OSError):  # for example on a full disk, which the error reports
                run.mark("interrupted" if ended else "failed", reason)
            raise
        finally:
            service.close()
        complaint: str | None = None
        if lost := roundlog.lost(run.path):
            rounds = "rounds" if run.config.has_a_line_per_round else "steps"
            complaint = f"{roundlog.FILE} has lost {rounds} {roundlog.in_words(lost)}"
            say(f"{run.name}: completed, but {complaint}; --resume --retrain-lost trains them again")
        run.mark("completed", complaint)
        log.info("completed", extra={"round": run.rounds})


def _has_diverged(run: Run) -> bool:
    """Return whether run.json states that the run diverged; False if it is missing or damaged."""
    try:
        return bool(read_run_file(run.path)["status"] == "diverged")
    except InputError:
        return False


def _service_of(run: Run, num_gpus: float) -> EvaluationService:
    system = run.config.system
    hparams = ServiceHParams(system.evaluators, num_gpus, deadline=system.evaluation_deadline)
    work = partial(evaluate_checkpoint, device="cuda" if num_gpus else "cpu")
    return EvaluationService(run.path.resolve(), work, hparams)


# Metrics of a run's rounds, which Ray's agent of each node exposes for Prometheus; docs/operations.md lists them.

GAUGES = {
    "round": "Completed rounds; in central training, steps.",
    "rounds": "Planned rounds or steps of the run.",
    "loss": "Training loss of the last round, nats per position.",
    "seconds": "Seconds of the last round; in central training, since the previous line.",
    "epsilon": "Epsilon at the last evaluated round, by convention, for a user or a record.",
}
COUNTERS = {"users": "Users trained by this process.", "examples": "Records trained by this process."}
TAGS = {"epsilon": ("convention", "of")}


class RoundMetrics:
    """The Ray metrics of the process that trains a run, named ``flsim_...``; none without Ray."""

    def __init__(self, run: Run) -> None:
        self._run, self._metrics = run, dict[str, Gauge | Counter]()
        if ray.is_initialized():  # otherwise Ray's metrics would start another Ray
            for kind, texts in ((Gauge, GAUGES), (Counter, COUNTERS)):
                for name, text in texts.items():
                    self._metrics[name] = kind(f"flsim_{name}", text, ("run", *TAGS.get(name, ())))

    def report(self, line: Mapping[str, Any]) -> None:
        for name in ("round", "loss", "seconds"):
            self._add(name, line[name])
        self._add("rounds", self._run.rounds)
        self._add("users", line.get("users"))
        self._add("examples", line.get("examples", line.get("records")))
        for key, unit in (("epsilon", "user"), ("record_epsilon", "record")):
            for convention, epsilon in (line.get(key) or {}).items():
                self._add("epsilon", epsilon, convention=convention, of=unit)

    def _add(self, name: str, value: float | None, **tags: str) -> None:
        """Set a gauge, or raise a counter; missing, infinite and NaN values, and 0 for a counter, have no effect."""
        metric = self._metrics.get(name)
        if metric is None or value is None or not math.isfinite(value):
            return
        tags = {"run": self._run.name.encode("ascii", "backslashreplace").decode(), **tags}  # as Ray requires
        if isinstance(metric, Gauge):
            metric.set(value, tags)
        elif value:
            metric.inc(value, tags)


# The training process of a central run, and its driver.

NEWS_EVERY = 0.5  # seconds between two progress reports


class Lost(Exception):  # noqa: N818 (an outcome)
    """The loss of a training process; the run can be resumed from its newest checkpoint."""


@dataclass(frozen=True)
class Progress:
    """Progress of the training process, for the driver."""

    step: int  # number of completed steps
    loss: float | None = None  # nats per position, since the last report
    saved: bool = False  # whether there is a checkpoint of this step
    # epsilons by the name of the convention, if they were computed
    spent: dict[str, float] = field(default_factory=dict)


def train(path: Path, gpus: float) -> Generator[Progress]:
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


def written(run: Run, state: State, chunks: Iterable[tuple[int, Log, State | None]]) -> Iterator[Progress]:
    """Save and log the training from `state` on, with a line for each saved state; Interrupted if it ended early."""
    roundlog.settle(run.path, state.round, run.config.has_a_line_per_round)
    spent, metrics = run.epsilons(state), RoundMetrics(run)
    yield Progress(state.round, spent=spent)
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
        yield Progress(step, _mean(unsaid), reached is not None, spent if evaluated else {})
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


def attempt(run: Run, gpus: float) -> Generator[Progress | None]:
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
    run: Run, told: Generator[Progress | None], evaluations: Evaluations, stop: Stop, stop_file: StopFile
) -> Iterator[Progress]:
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
