"""The supervision of a run in training: evaluation of its checkpoints, and the record of its end in run.json."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge

from flsim.algorithms import checkpoint
from flsim.base.errors import Diverged, InputError, Interrupted, RunFailed
from flsim.base.logs import log
from flsim.base.progress import progress, say
from flsim.base.terminal import console
from flsim.results.rows import round_in_short
from flsim.results.store import Evaluation, failures, read_run, read_run_file
from flsim.runs import roundlog
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from flsim.runs.trackers import tracking
from server.pool.evaluations import EvaluationInProcess, EvaluationService, ServiceHParams
from server.stopping import Stop

LOOK = 0.5  # seconds between two checks whether the run must end


class Evaluations:
    """The evaluations of one run, which training does not wait for; those without space in the queue follow later."""

    def __init__(self, run: Run, service: EvaluationService | EvaluationInProcess, stop: Stop | None = None) -> None:
        self._run, self._service, self._stop = run, service, stop or Stop()
        self._failed: set[str] = set()  # checkpoints that are not tried again before `--resume`
        self._left_over = False

    def submit(self, path: Path) -> None:
        """Submit a checkpoint to the evaluation, now or when the queue has space."""
        if not self._service.submit(path.resolve()):
            if not self._left_over:
                behind = (
                    f"{self._run.name}: evaluations are slower than training; {path.name} and later checkpoints "
                    "wait for a free evaluator"
                )
                say(behind, round=checkpoint.round_of(path), file=path.name)
            self._left_over = True

    def submit_unevaluated(self) -> None:
        """Submit all checkpoints whose evaluation is due and which have no rows."""
        self._left_over = not all(
            self._service.submit(path.resolve()) for path in self._run.unevaluated() if path.name not in self._failed
        )

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
            while self._is_busy:
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
        while self._is_busy and not self._stop.is_set():
            with suppress(Diverged):
                self._see(self._service.drain(timeout=LOOK))

    @property
    def _is_busy(self) -> bool:
        return self._left_over or self._service.pending > 0

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
        if ended and self._left_over:
            self.submit_unevaluated()
        diverged = next((evaluation for evaluation in ended if evaluation.outcome == "diverged"), None)
        if diverged:
            raise Diverged(f"the evaluation of {diverged.checkpoint} failed: {diverged.reason}")


@contextmanager
def supervised(
    run: Run,
    evaluation_gpus: float = 0.0,
    service: EvaluationService | EvaluationInProcess | None = None,
    stop: Stop | None = None,
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
        tags = {"run": self._run.name, **tags}
        if isinstance(metric, Gauge):
            metric.set(value, tags)
        elif value:
            metric.inc(value, tags)
