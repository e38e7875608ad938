"""Real checkpoints, evaluated alongside rounds without clients, under faults: nothing lost, double, or unreported."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from evaluator_work import wait_for, work
from helpers import Experiment, rows
from shown import to_markdown
from waiting import wait_until

from flsim.algorithms import checkpoint, fedavg
from flsim.base.errors import Diverged, RunFailed
from flsim.base.rng import stream
from flsim.results.store import read_evaluations, read_run
from flsim.results.tables import memorization_table
from flsim.runs import config
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from flsim.training.update import State
from server.pool.evaluations import EvaluationService, ServiceHParams
from server.stopping import Stop, stopping
from server.supervision import Evaluations, supervised

pytestmark = pytest.mark.usefixtures("local_ray")
DUE = (2, 4, 6, 8)


@pytest.fixture
def make(experiment: Experiment) -> Callable[..., Run]:
    """A run of 8 rounds, evaluated at every second."""

    def make(name: str = "run", references: int = 200) -> Run:
        overrides = ("training.rounds=8", f"evaluation.references={references}")
        return Run.create(config.load(experiment.config, overrides), experiment.folder / name)

    return make


@pytest.fixture
def service() -> Iterator[EvaluationService]:
    service = EvaluationService(evaluate_checkpoint, ServiceHParams(queue=1, retries=1))
    yield service
    service.close()


def state_after(run: Run, round_: int) -> State:
    """A model of its own for each round."""
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
    """All rounds that are left; `after` looks at each."""
    newest = checkpoint.latest(run.path / "checkpoints")
    for round_ in range(checkpoint.round_of(newest) + 1 if newest else 1, 9):
        run.log_round(round=round_)
        evaluations.saved(run.save(state_after(run, round_)))
        evaluations.poll()
        after(round_)


def about(run: Run) -> dict[str, Any]:
    return dict(json.loads((run.path / "run.json").read_text()))


def truth(run: Run, folder: Path) -> pd.DataFrame:
    """The rows of an evaluation in this process, without any service."""
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
def test_checkpoints_that_are_corrupt_foreign_or_gone_are_said_and_made_up_for(
    make: Callable[..., Run], tmp_path: Path
) -> None:
    """Round 2 is cut short, round 4 is of another architecture, round 6 is deleted; all of that before its turn."""
    run, kept = make(), tmp_path / "kept"
    kept.mkdir()
    expected = truth(run, tmp_path)

    def spoil(round_: int) -> None:
        """After the last round: the evaluator is busy with round 2, or not even there."""
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
        """Things happen to a checkpoint between its saving and its evaluation."""

        def submit(self, path: Path) -> None:
            (kept / path.name).write_bytes(path.read_bytes())
            spoil(checkpoint.round_of(path))
            super().submit(path)

    service = EvaluationService(evaluate_checkpoint)
    with pytest.raises(RunFailed) as caught, supervised(run, service=service):
        train(run, Spoiling(run, service))
    service.close()
    complaint = str(caught.value)
    assert complaint.startswith(name(2))
    assert "`flsim run --resume`" in complaint
    assert len((run.path / "rounds.jsonl").read_text().splitlines()) == 8  # training went on
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
def test_a_model_that_is_not_finite_is_recorded_as_diverged(
    make: Callable[..., Run], tmp_path: Path, service: EvaluationService
) -> None:
    """Once, in the run, in its rows and in the table; what was good before stays, and nobody evaluates it again."""
    run = make()
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
    run.mark("running")  # as after a kill: the row alone says it
    results = read_run(run.path)
    assert (results.status, results.reason) == ("diverged", "the model of round 4 is not finite")
    assert results.evaluated == [2]
    assert "the model of round 4 is not finite" in to_markdown(memorization_table([results]))


@pytest.mark.slow
def test_a_diverged_run_ends_on_sigterm_while_it_is_evaluated(make: Callable[..., Run], tmp_path: Path) -> None:
    """Its second evaluation waits for ever. The run is known as diverged before, and the first one failed."""
    run, stop, waiting = make(), Stop(), name(4)
    (tmp_path / f"{waiting}.wait").touch()
    service = EvaluationService(wait_or_fail)

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
    service.close()
    assert stop.signal == signal.SIGTERM
    assert about(run)["status"] == "diverged"
    assert outcomes(run) == {name(2): ["failed"]}


def wait_or_fail(run: Path, path: Path) -> None:
    """The work of an evaluator: what waits notes that it does, and everything else fails."""
    work(run, path)
    raise KeyError(path.name)
