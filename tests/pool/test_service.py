"""The evaluation service on a real, local Ray: order, memory, and failures of the work and of its processes."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import ray
import torch
from evaluator_work import TIMEOUT, freeze, log, names, niceness, outcomes_of, poll_until, wait_for, work
from helpers import Experiment, rows
from shown import to_markdown
from waiting import wait_until

from flsim.algorithms import checkpoint, fedavg
from flsim.base.errors import Diverged, RunFailed
from flsim.base.rng import stream
from flsim.results.rows import Evaluation, failures, log_evaluation, read_evaluations, read_run
from flsim.results.tables import memorization_table
from flsim.runs import config
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.training.update import State
from server.central import Evaluations, supervised
from server.pool import grid
from server.pool.grid import NICENESS, EvaluationService, ServiceHParams, limit_memory
from server.stopping import Stop, stopping

pytestmark = pytest.mark.usefixtures("local_ray")
FREE = "check that its share of the GPUs is free"


def test_submitting_does_not_wait_and_work_runs_in_order(service: EvaluationService, run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wait").touch()
    for name in ("a", "bb", "ccc", "bb", "a"):
        service.submit(run / name)
    assert service.poll() == []
    wait_for(tmp_path / "a.started")
    assert ray.available_resources()["CPU"] == 2  # all of them remain for clients
    assert service.drain(0.1) == []
    assert service.pending == 3  # repeated submissions are pending once
    assert names(tmp_path) == ["a"]
    (tmp_path / "a.go").touch()
    ended = service.drain(TIMEOUT)
    assert outcomes_of(ended) == [("a", "stored", 1), ("bb", "stored", 1), ("ccc", "stored", 1)]
    assert names(tmp_path) == ["a", "bb", "ccc"]
    assert len({line[1] for line in log(tmp_path)}) == 1
    assert (service.pending, service.poll(), service.drain()) == (0, [], [])
    assert read_evaluations(run) == ended
    assert all(each.seconds >= 0 and each.reason is None for each in ended)
    service.submit(run / "a")  # ended work can be submitted again
    assert outcomes_of(service.drain(TIMEOUT)) == [("a", "stored", 1)]


def test_an_evaluator_has_one_thread_and_a_low_priority(service: EvaluationService, run: Path, tmp_path: Path) -> None:
    """The evaluator's priority is below that of other processes of Ray; niceness 19 is the lowest priority."""
    service.submit(run / "a")
    others = ray.get(ray.remote(niceness).remote())
    assert len(service.drain(TIMEOUT)) == 1
    assert log(tmp_path)[0][2:4] == [str(min(19, others + NICENESS)), "1"]


def test_a_pool_evaluates_several_checkpoints_at_a_time(run: Path, tmp_path: Path) -> None:
    service = EvaluationService(run, work, ServiceHParams(evaluators=2))
    for name in ("a", "b"):
        (tmp_path / f"{name}.wait").touch()
    for name in ("a", "b", "c"):
        service.submit(run / name)
    for name in ("a", "b"):
        wait_for(tmp_path / f"{name}.started")
    (tmp_path / "b.go").touch()
    assert poll_until(service) == [("b", "stored", 1)]
    assert poll_until(service) == [("c", "stored", 1)]
    (tmp_path / "a.go").touch()
    assert outcomes_of(service.drain(TIMEOUT)) == [("a", "stored", 1)]
    service.close()
    pids = {name: pid for name, pid, *_ in log(tmp_path)}
    assert pids["c"] == pids["b"] != pids["a"]


def test_a_failure_has_a_reason_and_the_next_checkpoint_is_evaluated(service: EvaluationService, run: Path) -> None:
    """Work that raises an error is not repeated, because it would raise the error again."""
    for name in ("bad", "nan", "a"):
        service.submit(run / name)
    bad, nan, good = service.drain(TIMEOUT)
    assert (bad.outcome, bad.reason) == ("failed", r"KeyError: 'no such\ncorpus' is missing")
    assert nan.outcome == "diverged"
    assert nan.reason == "round 3: 1 of 8 values of parameter embedding are not finite"
    assert outcomes_of([good]) == [("a", "stored", 1)]
    assert failures(run) == {"bad": bad.reason}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "reason"), [("hungry", "MemoryError: too large"), ("starved", "RuntimeError: .*can't allocate memory")]
)
def test_a_process_that_runs_out_of_memory_is_replaced(
    service: EvaluationService, run: Path, tmp_path: Path, name: str, reason: str
) -> None:
    """Other work runs first. The errors are those of Python and of torch on a CPU."""
    for each in (name, "a"):
        service.submit(run / each)
    assert outcomes_of(service.drain(TIMEOUT)) == [("a", "stored", 1), (name, "stored", 2)]
    (first, one), (second, two), (third, three) = ((line[0], line[1]) for line in log(tmp_path))
    assert (first, second, third) == (name, "a", name)
    assert one != two == three
    why, *others = (attempt.reason for attempt in read_evaluations(run))
    assert re.match(reason, str(why))
    assert others == [None, None]


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_its_work_done_again(
    service: EvaluationService, run: Path, tmp_path: Path
) -> None:
    """The process is killed twice."""
    (tmp_path / "bb.wait").touch()
    for name in ("a", "bb"):
        service.submit(run / name)
    assert poll_until(service) == [("a", "stored", 1)]
    for _ in range(2):
        wait_for(tmp_path / "bb.started", service.poll)
        (tmp_path / "bb.started").unlink()
        os.kill(int(log(tmp_path)[-1][1]), signal.SIGKILL)
    (tmp_path / "bb.go").touch()
    service.submit(run / "ccc")
    assert sorted(outcomes_of(service.drain(TIMEOUT))) == [("bb", "stored", 3), ("ccc", "stored", 1)]
    assert sorted(names(tmp_path)) == ["a", "bb", "bb", "bb", "ccc"]
    outcomes = [attempt.outcome for attempt in read_evaluations(run) if attempt.checkpoint == "bb"]
    assert outcomes == ["retried", "retried", "stored"]


def test_a_process_killed_while_idle_costs_one_attempt(service: EvaluationService, run: Path, tmp_path: Path) -> None:
    service.submit(run / "a")
    service.drain(TIMEOUT)
    os.kill(int(log(tmp_path)[0][1]), signal.SIGKILL)
    service.submit(run / "bb")
    (bb,) = service.drain(TIMEOUT)
    assert (bb.checkpoint, bb.outcome) == ("bb", "stored")
    assert names(tmp_path) == ["a", "bb"]


@pytest.mark.slow
def test_work_that_always_kills_its_process_fails_and_delays_no_other_work(run: Path, tmp_path: Path) -> None:
    service = EvaluationService(run, work, ServiceHParams(retries=1))
    for name in ("dies", "a"):
        service.submit(run / name)
    first, dead = service.drain(TIMEOUT)
    assert outcomes_of([first, dead]) == [("a", "stored", 1), ("dies", "failed", 2)]
    assert str(dead.reason).startswith("it failed 2 times, last with: its process died: ")
    assert names(tmp_path) == ["dies", "a", "dies"]
    assert [attempt.outcome for attempt in read_evaluations(run)] == ["retried", "stored", "failed"]
    assert failures(run) == {"dies": dead.reason}
    service.submit(run / "a")
    assert outcomes_of(service.drain(TIMEOUT)) == [("a", "stored", 1)]
    service.close()


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_killed(run: Path, tmp_path: Path) -> None:
    """The first process waits for a file that never comes; the second one is frozen, and cannot end itself."""
    service = EvaluationService(run, work, ServiceHParams(deadline=2.0, retries=1))
    (tmp_path / "hangs.wait").touch()
    service.submit(run / "hangs")
    wait_for(tmp_path / "hangs.started")
    (tmp_path / "hangs.started").unlink()
    wait_for(tmp_path / "hangs.started", service.poll)
    os.kill(int(log(tmp_path)[1][1]), signal.SIGSTOP)
    service.submit(run / "a")
    hung, good = service.drain(TIMEOUT)
    assert outcomes_of([hung, good]) == [("hangs", "failed", 2), ("a", "stored", 1)]
    assert hung.reason == "it failed 2 times, last with: no result within 2 s"
    assert [attempt.outcome for attempt in read_evaluations(run)] == ["retried", "failed", "stored"]
    deadline = time.monotonic() + TIMEOUT
    for pid in {line[1] for line in log(tmp_path) if line[0] == "hangs"}:
        while Path("/proc", pid).exists():
            assert time.monotonic() < deadline, f"{pid} lives on"
            time.sleep(0.01)
    service.close()


@pytest.mark.nightly
def test_work_that_freezes_at_once_has_no_more_time_than_other_work(run: Path) -> None:
    """Three attempts vary whether Ray reports the start before the freeze; the deadline of a start is minutes."""
    service = EvaluationService(run, freeze, ServiceHParams(deadline=0.5, retries=2))
    service.submit(run / "a")
    assert outcomes_of(service.drain(TIMEOUT)) == [("a", "failed", 3)]
    service.close()


@pytest.mark.slow
def test_a_process_that_never_starts_is_requested_again_with_twice_the_deadline(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    """No machine of this cluster has a GPU, so Ray never starts a process that needs one."""
    monkeypatch.setattr("server.pool.grid.START_DEADLINE", 0.2)
    service = EvaluationService(run, freeze, ServiceHParams(num_gpus=1.0, retries=2))
    service.submit(run / "a")
    (failed,) = service.drain(TIMEOUT)
    assert [line.reason for line in read_evaluations(run)] == [
        *(f"no process started within {seconds} s; {FREE}" for seconds in (0.2, 0.4)),
        f"it failed 3 times, last with: no process started within 0.8 s; {FREE}",
    ]
    assert failed.outcome == "failed"
    service.close()


def test_nothing_starts_before_the_first_submission(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    service = EvaluationService(run, work)
    assert service.poll() == service.drain() == []
    service.close()
    with pytest.raises(RunFailed, match="needs Ray, which is not initialised"):
        service.submit(Path("a"))


def test_a_line_cut_short_and_a_later_success_are_no_failures(run: Path) -> None:
    for name in ("round-000001", "round-000002", "round-000003"):
        log_evaluation(run, Evaluation(f"{name}.safetensors", "failed", 4, 1.0, 9.0, reason="it died"))
    log_evaluation(run, Evaluation("round-000002.safetensors", "stored", 1, 1.0, 9.0))
    with (run / "evaluations.jsonl").open("a") as file:
        file.write('{"checkpoint": "round-0000')
    (run / "rows").mkdir()
    (run / "rows" / "round-000001.parquet").touch()
    assert failures(run) == {"round-000003.safetensors": "it died"}
    assert failures(run.parent) == {}


@pytest.mark.parametrize(
    ("gigabytes", "share", "expected"),
    [(140, 0.05, 0.05), (140, 1.0, 1.0), (140, 2.0, 1.0), (8, 0.05, 2**30 / 8e9), (0.5, 0.05, 1.0)],
)
def test_the_memory_limit_is_the_share_but_at_least_1_gibibyte(
    gigabytes: float, share: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[float] = []
    about = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    fakes = {"is_available": lambda: True, "get_device_properties": lambda _: about}
    for name, fake in {**fakes, "set_per_process_memory_fraction": fractions.append}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    limit_memory(share)
    assert fractions == [pytest.approx(expected)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, of which there is none")
def test_more_than_the_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MEMORY", 0)
    whole = torch.cuda.get_device_properties(0).total_memory
    try:
        limit_memory(0.02)
        torch.empty(int(0.01 * whole), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.03 * whole), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


DUE = (2, 4, 6, 8)


@pytest.fixture
def make(experiment: Experiment) -> Callable[..., Run]:
    """Return a function that creates a run of 8 rounds, evaluated every second round."""

    def make(name: str = "run", references: int = 200) -> Run:
        overrides = ("training.rounds=8", f"evaluation.references={references}")
        return Run.create(config.load(experiment.config, overrides), experiment.folder / name)

    return make


def state_after(run: Run, round_: int) -> State:
    """Return a state with a different model for each round."""
    rng = stream(0, "fault test", round_)
    settings = run.federated
    vocabulary = run.corpus.layout.vocabulary_size
    state = fedavg.init(vocabulary, settings.model, settings.seed, settings.training, settings.privacy)
    params = {
        name: torch.from_numpy(rng.normal(0, 0.3, value.shape)).to(value)
        for name, value in sorted(state.params.items())
    }
    return replace(state, round=round_, params=params)


def train(run: Run, evaluations: Evaluations, after: Callable[[int], None] = lambda _: None) -> None:
    """Save and evaluate all remaining rounds; `after` is called after each."""
    newest = checkpoint.latest(run.path / "checkpoints")
    for round_ in range(checkpoint.round_of(newest) + 1 if newest else 1, 9):
        run.log_round(round=round_)
        evaluations.saved(run.save(state_after(run, round_)))
        evaluations.poll()
        after(round_)


def about(run: Run) -> dict[str, Any]:
    return dict(json.loads((run.path / "run.json").read_text()))


def truth(run: Run, folder: Path) -> pd.DataFrame:
    """Return the rows of an evaluation in this process, without any service."""
    twin = Run.create(run.config, folder / "truth" / run.name)
    for round_ in DUE:
        evaluate_checkpoint(twin.path, twin.save(state_after(twin, round_)))
    return rows(twin.path)


def outcomes(run: Run) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in read_evaluations(run.path):
        found.setdefault(each.checkpoint, []).append(each.outcome)
    return found


def name(round_: int) -> str:
    return f"round-{round_:06d}.safetensors"


@pytest.mark.slow
def test_unusable_checkpoints_are_reported_and_evaluated_once_they_are_restored(
    make: Callable[..., Run], tmp_path: Path
) -> None:
    """Before its evaluation, round 2 is cut short, round 4 gets a model of other sizes, and round 6 is deleted."""
    run, kept = make(), tmp_path / "kept"
    kept.mkdir()
    expected = truth(run, tmp_path)

    def spoil(round_: int) -> None:
        """Damage, replace or delete the checkpoint of a round before it is submitted."""
        path = run.path / "checkpoints" / name(round_)
        if round_ == 2:
            path.write_bytes(path.read_bytes()[:-100])
        if round_ == 4:
            sizes = replace(run.provenance, model=replace(run.provenance.model, units=9))
            other = checkpoint.model_of(sizes)
            params = {name: value.detach() for name, value in other.named_parameters()}
            checkpoint.save(run.path / "checkpoints", replace(state_after(run, 4), params=params), sizes)
        if round_ == 6:
            path.unlink()

    class Spoiling(Evaluations):
        """Evaluations whose checkpoints are spoiled between their saving and their evaluation."""

        def submit(self, path: Path) -> None:
            (kept / path.name).write_bytes(path.read_bytes())
            spoil(checkpoint.round_of(path))
            super().submit(path)

    service = EvaluationService(run.path, evaluate_checkpoint)
    with pytest.raises(RunFailed) as caught, supervised(run, service=service):
        train(run, Spoiling(run, service))
    complaint = str(caught.value)
    assert complaint.startswith(name(2))
    assert "`flsim run --resume`" in complaint
    assert len((run.path / "rounds.jsonl").read_text().splitlines()) == 8  # training continued
    reasons = {each.checkpoint: str(each.reason) for each in read_evaluations(run.path)}
    for round_, why in ((2, "damaged"), (4, "another model"), (6, "No such file")):
        assert why in reasons[name(round_)]
    assert outcomes(run) == {name(2): ["failed"], name(4): ["failed"], name(6): ["failed"], name(8): ["stored"]}
    assert (about(run)["status"], about(run)["reason"]) == ("failed", complaint)
    results = read_run(run.path)
    assert results.evaluated == [8]
    assert set(results.failures) == {name(2), name(4), name(6)}
    assert complaint in " ".join(to_markdown(memorization_table([results])).split())

    for path in kept.iterdir():
        (run.path / "checkpoints" / path.name).write_bytes(path.read_bytes())
    with supervised(run) as evaluations:
        assert about(run)["status"] == "running"
        train(run, evaluations)
    assert (about(run)["status"], about(run)["reason"]) == ("completed", None)
    assert outcomes(run) == {name(round_): ["failed", "stored"] for round_ in (2, 4, 6)} | {name(8): ["stored"]}
    pd.testing.assert_frame_equal(rows(run.path), expected, check_exact=True)


@pytest.mark.slow
def test_a_model_that_is_not_finite_is_recorded_as_diverged(make: Callable[..., Run], tmp_path: Path) -> None:
    """Run, rows and table record the divergence once. Good rows stay, and the model is not evaluated again."""
    run = make()
    service = EvaluationService(run.path, evaluate_checkpoint, ServiceHParams(retries=1))
    good = truth(run, tmp_path)
    spoilt = state_after(run, 4)
    spoilt.params["embedding"][0, 0] = torch.nan

    def save_both() -> None:
        with supervised(run, service=service) as evaluations:
            evaluations.saved(run.save(state_after(run, 2)))
            evaluations.saved(run.save(spoilt))

    with pytest.raises(Diverged, match=r"round 4: 1 of \d+ values of parameter embedding are not finite.*last good"):
        save_both()
    assert about(run)["status"] == "diverged"
    assert outcomes(run) == {name(2): ["stored"], name(4): ["diverged"]}
    pd.testing.assert_frame_equal(rows(run.path), good[good["round"] == 2], check_exact=True)
    before = (run.path / "rows" / "round-000004.parquet").read_bytes()
    with pytest.raises(Diverged):
        evaluate_checkpoint(run.path, run.path / "checkpoints" / name(4))
    assert (run.path / "rows" / "round-000004.parquet").read_bytes() == before
    assert run.unevaluated() == []
    with pytest.raises(Diverged), supervised(run, service=service):
        pass
    run.mark("running")  # as after a kill: only the row records it
    results = read_run(run.path)
    assert (results.status, results.reason) == ("diverged", "the model of round 4 is not finite")
    assert results.evaluated == [2]
    assert "the model of round 4 is not finite" in to_markdown(memorization_table([results]))


@pytest.mark.slow
def test_a_diverged_run_ends_on_sigterm_while_it_is_evaluated(make: Callable[..., Run], tmp_path: Path) -> None:
    """The second evaluation never ends, and the first one failed. SIGTERM comes once the run is known as diverged."""
    run, stop, waiting = make(), Stop(), name(4)
    (tmp_path / f"{waiting}.wait").touch()
    service = EvaluationService(run.path, wait_or_fail)

    def diverge() -> None:
        with supervised(run, service=service, stop=stop) as evaluations:
            for round_ in (2, 4):
                evaluations.saved(run.save(state_after(run, round_)))
            wait_for(tmp_path / f"{waiting}.started", look=evaluations.poll)
            raise Diverged("step 5: a loss that is not finite")

    def end() -> None:
        try:
            wait_until(lambda: about(run)["status"] == "diverged", seconds=60)
            os.kill(os.getpid(), signal.SIGTERM)
        except AssertionError:
            (tmp_path / f"{waiting}.go").touch()
            raise

    with ThreadPoolExecutor(1) as pool, stopping(stop):
        ended = pool.submit(end)
        with pytest.raises(Diverged, match="step 5: a loss"):
            diverge()
        ended.result()
    assert stop.signal == signal.SIGTERM
    assert about(run)["status"] == "diverged"
    assert outcomes(run) == {name(2): ["failed"]}


def wait_or_fail(run: Path, path: Path) -> None:
    """Do the work of an evaluator: wait if a file asks for it, and then fail."""
    work(run, path)
    raise KeyError(path.name)
