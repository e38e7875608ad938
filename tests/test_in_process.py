"""`flsim run --in-process` trains without Ray, and has the same results as a run on Ray."""

import json
import signal
from pathlib import Path

import pytest
from helpers import CENTRAL, TINY, Experiment, Flsim, Trained, assert_same, final_state, start
from waiting import wait_until

from flsim.algorithms.checkpoint import latest, round_of

PRIVATE = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=0.8", "training.optimizer=rmsprop")


def losses(run: Path) -> list[tuple[int, float, str]]:
    lines = (run / "rounds.jsonl").read_text().splitlines()
    return [(line["round"], line["loss"], line["digest"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits_and_spends_once(central_experiment: Experiment, flsim: Flsim) -> None:
    """A killed run resumes to 11 steps, half an epoch, after its newest checkpoint, and equals an uninterrupted run."""
    broken, whole = (central_experiment.folder / name for name in ("broken", "whole"))

    def options(steps: int) -> list[str]:
        return [part for text in (*PRIVATE, f"training.steps={steps}") for part in ("--set", text)]

    process = start(central_experiment, "--out", "broken", "--in-process", *options(1_000_000))
    wait_until(lambda: bool((newest := latest(broken / "checkpoints")) and round_of(newest) >= 28))
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = final_state(broken).round + 11
    for out, resume in ((broken, ["--resume"]), (whole, [])):
        arguments = ("--out", out, "--in-process", *options(steps), *resume)
        assert flsim("run", central_experiment.config, *arguments)[0] == 0
    assert_same(broken, whole)
    assert losses(broken) == losses(whole)
    assert [entry.rounds for entry in final_state(broken).ledger.entries] == [steps]


@pytest.mark.parametrize(
    ("config", "rate", "reason"),
    [
        (CENTRAL, "training.learning_rate=1e30", "a loss that is not finite"),
        (TINY, "local.learning_rate=1e30", "local.learning_rate is too high"),
    ],
    ids=["central", "federated"],
)
def test_divergence_ends_the_run(experiment: Experiment, flsim: Flsim, config: str, rate: str, reason: str) -> None:
    experiment.config.write_text(config)
    out = experiment.folder / "wild"
    code, _, err = flsim("run", experiment.config, "--out", out, "--in-process", "--set", rate)
    assert code == 1
    assert reason in err
    assert json.loads((out / "run.json").read_text())["status"] == "diverged"


def test_what_needs_ray_is_refused_and_leaves_no_run(central_experiment: Experiment, flsim: Flsim) -> None:
    out = central_experiment.folder / "new"
    for options, message in (
        (("--address", "auto"), "--in-process does not use Ray; remove --address, --head and --cpus"),
        (("--set", "system.device=cuda"), '--in-process needs a CPU; set system.device = "cpu"'),
    ):
        code, _, err = flsim("run", central_experiment.config, "--out", out, "--in-process", *options)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
        assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "overrides"),
    [(CENTRAL, PRIVATE), (TINY, ("system.shards=3", "system.branch=2", *PRIVATE[:3]))],
    ids=["central, private", "branches, private"],
)
def test_a_run_in_process_equals_a_run_on_ray(
    experiment: Experiment, trained: Trained, flsim: Flsim, config: str, overrides: tuple[str, ...]
) -> None:
    """Parameters, ledger, losses and rows are equal; in this process, shards are trained one after another."""
    experiment.config.write_text(config)
    on_ray = trained(*overrides)
    options = [part for override in overrides for part in ("--set", override)]
    in_process = experiment.folder / "in-process"
    code, out, err = flsim("run", experiment.config, "--out", in_process, "--in-process", *options)
    assert (code, "Traceback" in err, "|" in out) == (0, False, True)
    assert_same(in_process, on_ray)
    assert final_state(in_process).ledger == final_state(on_ray).ledger
    assert losses(in_process) == losses(on_ray)
    assert json.loads((in_process / "run.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("about", [None, "{"], ids=["lost", "cut"])
def test_a_run_resumes_without_its_run_json(
    experiment: Experiment, copy_of_trained: Trained, flsim: Flsim, about: str | None
) -> None:
    """A loss of power can remove, empty or cut run.json. The run resumes from its other files, and completes."""
    out = copy_of_trained("training.rounds=1")
    (out / "run.json").unlink()
    if about is not None:
        (out / "run.json").write_text(about)
    more = ("--resume", "--set", "training.rounds=2")
    assert flsim("run", experiment.config, "--out", out, "--in-process", *more)[0] == 0
    assert json.loads((out / "run.json").read_text())["status"] == "completed"
    assert len(losses(out)) == 2
