"""Which copies are trained, what their logs say, and whose memory it is."""

import json
import os
from pathlib import Path

import pytest
from helpers import Experiment

from flsim.base.machine import Memory
from flsim.planning.calibration import copies_of, observe, scratch
from flsim.planning.kinds import FEWEST, FEWEST_REFERENCES, REFERENCES, canaries_of, kind_of
from flsim.planning.monitor import Watch, run_of, share_of_others
from flsim.planning.monitor import kind_of as kind_of_process
from flsim.results.evaluations import Evaluation, log_evaluation
from flsim.runs.config import CentralConfig, FederatedConfig, load
from flsim.sweeps.definition import Planned, planned_runs, tier_of
from flsim.sweeps.definition import load as load_sweep

BEGAN = 1_000_000.0  # seconds since 1970


def runs_of(file: Path, tier: str = "smoke", *only: str) -> list[Planned]:
    definition = load_sweep(file)
    return planned_runs(definition, tier_of(definition, tier, "here"), Path("corpus"), "here", only=only)


def test_the_least_and_the_greatest_of_each_kind(sweep_file: Path) -> None:
    """Two kinds of four sizes, and a private one of one: what is private is a kind of its own."""
    copies = copies_of(runs_of(sweep_file), lambda _: 1, 250, 30, 600)
    assert [copy.config.round_size for copy in copies] == [256, 32, 40, 4, 40]
    assert len({copy.kind for copy in copies}) == 3
    assert not any(copy.is_cold for copy in copies), "no cluster starts before them"


def test_as_many_at_once_and_the_first_ones_twice(sweep_file: Path) -> None:
    copies = copies_of(runs_of(sweep_file), lambda _: 2, 250, 30, 600)
    assert [copy.config.round_size for copy in copies] == [256, 32, 256, 32, 40, 4, 40, 40]
    assert [copy.is_cold for copy in copies] == [True, True, *[False] * 6]


def test_what_changes_no_cost_makes_no_kind(experiment: Experiment) -> None:
    same = [[], ["seed=1"], ["data.world='iid'"], ["training.rounds=9"], ["local.learning_rate=0.1"]]
    other = [["model.units=13"], ["local.batch_size=5"], ["system.engine='local'"], ["evaluation.references=9"]]
    assert len({kind_of(load(experiment.config, overrides)) for overrides in same}) == 1
    assert len({kind_of(load(experiment.config, overrides)) for overrides in [[], *other]}) == 1 + len(other)


@pytest.mark.parametrize("tier", ["smoke", "paper"])
def test_copies_are_evaluated_twice_at_the_end(sweep_file: Path, tier: str) -> None:
    """Federated ones after the last round but one and the last; central ones after their last two lines."""
    for copy in copies_of(runs_of(sweep_file, tier), lambda _: 2, 2_000, 237, 10_000):
        config = copy.config
        if isinstance(config, FederatedConfig):
            rounds = config.training.rounds
            assert rounds >= FEWEST
        elif isinstance(config, CentralConfig):
            assert config.training.steps is not None
            rounds = config.training.steps // config.system.checkpoint_every
            assert config.training.steps % config.system.checkpoint_every == 0
        saved = config.system.checkpoint_every if isinstance(config, CentralConfig) else 1
        assert [each for each in range(1, rounds) if config.evaluation.is_due(each * saved, 1.0)] == [rounds - 1]
        assert config.evaluation.references <= min(REFERENCES, {"smoke": 20_000, "paper": 2_000_000}[tier])


def test_a_large_cohort_is_cut_rather_than_its_rounds(sweep_file: Path) -> None:
    """The paper's cohort of 5,000 would train for hours on a core; 237 records of 2,000 words a user."""
    (copy, *_) = copies_of(runs_of(sweep_file, "paper", "fedavg"), lambda _: 1, 2_000, 237, 10_000)
    assert isinstance(copy.config, FederatedConfig)
    assert copy.config.training.cohort < 20
    assert copy.config.training.rounds >= FEWEST


def test_ranks_that_take_minutes_are_cut_and_counted(sweep_file: Path) -> None:
    """The paper has 90 canaries and 2,000,000 references; a smoke run keeps its own, and needs one number of them."""
    large = copies_of(runs_of(sweep_file, "paper", "dp"), lambda _: 1, 2_000, 237, 10_000)
    assert [canaries_of(copy.config) for copy in large] == [9, 9, 0]
    most, quarter, _ = (copy.config.evaluation.references for copy in large)
    assert FEWEST_REFERENCES <= most < REFERENCES
    assert quarter == most // 4
    on_a_gpu = copies_of(runs_of(sweep_file, "paper", "dp"), lambda _: 1, 2_000, 237, 10_000, "cuda")
    assert [canaries_of(copy.config) for copy in on_a_gpu] == [90, 90]
    assert [copy.config.evaluation.references for copy in on_a_gpu] == [REFERENCES, REFERENCES // 4]
    (small,) = copies_of(runs_of(sweep_file, "smoke", "dp"), lambda _: 1, 250, 30, 600)
    assert (canaries_of(small.config), small.config.evaluation.references) == (36, 20_000)


def write_log(run: Path, lines: list[dict[str, object]], trained: float, evaluated: list[tuple[float, float]]) -> None:
    """A run's logs, the last line written at `trained`; evaluations as (seconds, ended)."""
    run.mkdir()
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(run / "rounds.jsonl", (trained, trained))
    for number, (seconds, ended) in enumerate(evaluated):
        log_evaluation(run, Evaluation(f"round-{number:06d}.safetensors", "stored", 1, seconds, ended))


def test_a_federated_log(experiment: Experiment) -> None:
    """Process from second 0, first round from 12 to 17, then 0.5 s each; the one before the last takes 0.9 s.

    Evaluations end at 27 and 29: that is 2 s for the last, so 7.1 s for the first with the start of its process.
    """
    seconds = [5.0, 0.5, 0.5, 0.5, 0.9, 0.5]
    lines: list[dict[str, object]] = [
        {"round": k, "seconds": each, "users": 6} for k, each in enumerate(seconds, start=1)
    ]
    over = BEGAN + 12 + sum(seconds)
    write_log(experiment.folder / "log", lines, over, [(3.0, BEGAN + 27), (2.0, BEGAN + 29)])
    overrides = ["training.rounds=6", "evaluation.every=5"]
    found = observe(experiment.folder / "log", load(experiment.config, overrides), BEGAN, BEGAN + 33)
    assert found.size == 6
    assert found.rounds == (0.5, 0.5, 0.5)
    assert found.start == pytest.approx(12 + 4.5)
    assert found.pause == 0
    assert found.evaluation == 2
    assert found.first_evaluation == pytest.approx(29 - 2 - (12 + sum(seconds)))
    assert found.end == pytest.approx(4)
    private = [*overrides, "privacy.mechanism='dp'", "privacy.clip=1", "privacy.noise_multiplier=1"]
    accounted = observe(experiment.folder / "log", load(experiment.config, private), BEGAN, BEGAN + 33)
    assert accounted.pause == pytest.approx(0.4)


def test_a_central_log(experiment: Experiment) -> None:
    """A line is 10 steps: the first in 3 s, others in 1 s, which is 0.1 s a step."""
    lines: list[dict[str, object]] = [
        {"round": 10 * k, "seconds": 3.0 if k == 1 else 1.0, "records": 80} for k in range(1, 7)
    ]
    write_log(experiment.folder / "log", lines, BEGAN + 20, [(3.0, BEGAN + 25), (2.0, BEGAN + 27)])
    path = experiment.folder / "central.toml"
    federated = "rounds = 4\ncohort = 6\n[local]\nbatch_size = 4\n"
    central = 'kind = "central"\nsteps = 60\nbatch_size = 8\n'
    text = experiment.config.read_text().replace(federated, central).replace("every = 2", "every = 50")
    path.write_text(text.replace("shards = 1\n", ""))
    found = observe(experiment.folder / "log", load(path), BEGAN, BEGAN + 30)
    assert found.size == 8
    assert found.rounds == pytest.approx((0.1, 0.1, 0.1))
    assert found.start == pytest.approx(20 - 8 + 2)
    assert (found.first_evaluation, found.evaluation, found.end) == pytest.approx((5, 2, 3))
    alone = observe(experiment.folder / "log", load(path), BEGAN, BEGAN + 30, in_process=True)
    assert alone.start == pytest.approx(20 - 8 + 2 - 3)
    assert (alone.first_evaluation, alone.evaluation, alone.end) == pytest.approx((3, 2, 3))


def test_what_a_process_is_for() -> None:
    command = ["/usr/bin/python", "-m", "flsim", "run", "a.toml", "--out", "/tmp/a", "--cpus", "1"]
    assert (run_of(command), kind_of_process(command)) == ("/tmp/a", "driver")
    assert run_of(["ray::_in_process"]) is None
    assert kind_of_process(["ray::Client.run"]) == kind_of_process(["ray::train"]) == "training"
    assert kind_of_process(["ray::_Evaluator.evaluate"]) == "evaluator"
    assert (
        kind_of_process(["ray::IDLE"])
        == kind_of_process(["ray::DashboardAgent"])
        == kind_of_process(["/x/raylet", "--a"])
        == kind_of_process([])
        == "Ray"
    )


def test_memory_is_as_sweeps_record_it() -> None:
    """Of this process and all below it, by another way to read it; it may have grown in between."""
    watch = Watch()
    watch.look()
    assert watch.peak == pytest.approx(Memory.held_by(os.getpid()).total, rel=0.1)
    assert (watch.rest, watch.run, watch.began) == (watch.peak, 0, {})


def test_a_scratch_folder_is_gone_whatever_happens() -> None:
    made = []

    def interrupted() -> None:
        with scratch() as folder:
            (folder / "more").mkdir()
            made.append(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not made[0].exists()


def test_what_others_compute_is_a_share_of_all_cores() -> None:
    """Two cores for 10 s: 4 s idle, 11 s ours, so that 5 of 20 are others'."""
    assert share_of_others((100.0, 50.0, 3.0), (120.0, 54.0, 14.0)) == 0.25
    assert share_of_others((100.0, 50.0, 3.0), (120.0, 54.0, 20.0)) == 0, "ticks of different clocks"
    assert share_of_others((100.0, 50.0, 3.0), (100.0, 50.0, 3.0)) == 0, "the first look"
