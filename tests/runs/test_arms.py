"""A run of arm OUT that starts with the rounds of arm IN has the bits of a run that trains these rounds itself."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import PARTITION, PRIVATE, Experiment, Trained, assert_same, go_on_here

from flsim.algorithms import checkpoint, micro_cohorts
from flsim.base.errors import InputError
from flsim.canaries.spec import CanaryHParams
from flsim.results.rows import read_run, rows_in
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.recovery import begin_from

COMMON = ("training.rounds=8", "canaries.p_u=[0.1]", "canaries.p_e=[0.5]", "canaries.count=12")
WINDOWED = (*COMMON[:-1], "canaries.count=6", "canaries.windows=[[5, 7], [6, 8]]")
INJECTED = ("training.rounds=8", f"canaries.p_u={list(CanaryHParams.p_u)}", f"canaries.p_e={list(CanaryHParams.p_e)}")
OUT = "canaries.arm='out'"
CENTRAL = f"""{PARTITION}[training]
kind = "central"
steps = 8
batch_size = 4
learning_rate = 0.1
[evaluation]
every = 2
references = 200
[system]
checkpoint_every = 1
"""


def new_run(twin: Path, folder: Path, *overrides: str) -> Run:
    return Run.create(load(twin.parent / "tiny.toml", overrides), folder / "begun")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ((*WINDOWED, *PRIVATE), 5),
        ((*COMMON, "canaries.windows=[[0.6, 1]]"), 5),
        ((*INJECTED, "canaries.injections=[6]", "canaries.count=4", "canaries.injection_copies=3"), 6),
    ],
    ids=["private", "shares", "injections"],
)
def test_a_run_that_starts_from_its_twin_has_the_same_bits(
    trained_here: Trained, tmp_path: Path, settings: tuple[str, ...], parts: int
) -> None:
    planting, whole = trained_here(*settings), trained_here(*settings, OUT)
    run = begin_from(new_run(planting, tmp_path, *settings, OUT), Run.open(planting))
    reached = run.latest_state().round
    assert reached == run.parting == parts
    kept = {round_ for round_ in (2, 4, 6) if round_ <= reached} | {reached}
    assert {checkpoint.round_of(path) for path in checkpoint.all_in(run.path / "checkpoints")} == kept
    assert [path.stem for path in rows_in(run.path)] == [f"round-{at:06d}" for at in (2, 4, 6) if at <= reached]
    go_on_here(run)
    assert_same(run.path, whole)
    assert checkpoint.digest_of(run.latest_state()) == checkpoint.digest_of(Run.open(whole).latest_state())
    assert read_run(run.path).identity == read_run(whole).identity


def test_the_checkpoint_at_which_arms_part_is_kept(trained_here: Trained) -> None:
    """Round 5 is not evaluated, because the schedule has every second round, and later checkpoints follow it."""
    kept = checkpoint.all_in(trained_here(*WINDOWED) / "checkpoints")
    assert [checkpoint.round_of(path) for path in kept] == [2, 4, 5, 6, 7, 8]


def test_arms_part_at_the_first_window_or_injection() -> None:
    def parting(**settings: object) -> int:
        canaries = CanaryHParams(**{"count": 1, **settings})  # type: ignore[arg-type]
        parted = canaries.parting(10)
        assert replace(canaries, arm="out").parting(10) == parted
        return parted

    assert parting() == 0
    assert parting(windows=((0.5, 0.6), (0.3, 0.4))) == 3
    assert parting(windows=((4, 6), (2, 8))) == 2
    assert parting(windows=((0.5, 0.5),)) == 5
    assert parting(injections=(0.9, 4)) == 4


def test_a_run_that_is_not_the_other_arm_is_refused(trained_here: Trained, tmp_path: Path) -> None:
    planting = trained_here(*WINDOWED)
    twin = Run.open(planting)
    for name, settings, message in (
        ("same", WINDOWED, "is of arm IN and so is this run"),
        ("other", (*WINDOWED, OUT, "seed=1"), "differs from this run in more settings than canaries.arm"),
        ("longer", (*WINDOWED, OUT, "training.rounds=16"), "trains 8 rounds, and this run 16"),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=message):
            begin_from(new_run(planting, tmp_path / name, *settings), twin)
    with pytest.raises(InputError, match="has already started"):
        begin_from(Run.open(trained_here(*WINDOWED, OUT)), twin)


def test_without_shared_rounds_a_run_starts_from_the_beginning(
    trained_here: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planting = trained_here(*COMMON, "canaries.windows=[[0, 4]]")
    run = begin_from(new_run(planting, tmp_path, *COMMON, "canaries.windows=[[0, 4]]", OUT), Run.open(planting))
    assert "starts from the beginning, because run has no checkpoint up to round 0" in capsys.readouterr().err
    assert not checkpoint.all_in(run.path / "checkpoints")


def test_rows_are_those_of_its_own_schedule(trained_here: Trained, tmp_path: Path) -> None:
    """The run is evaluated every fourth round and its twin every second: it has rows of round 4 and none of round 2."""
    planting = trained_here(*WINDOWED)
    run = begin_from(new_run(planting, tmp_path, *WINDOWED, OUT, "evaluation.every=4"), Run.open(planting))
    assert [path.stem for path in rows_in(run.path)] == ["round-000004"]
    go_on_here(run)
    whole = read_run(trained_here(*WINDOWED, OUT)).rows
    assert read_run(run.path).rows.equals(whole[whole["round"].isin([4, 8])].reset_index(drop=True))


def test_a_round_that_only_this_run_evaluates_is_trained(trained_here: Trained, tmp_path: Path) -> None:
    """The run evaluates every third round. The twin has checkpoints of rounds 2, 4 and 5, and none of round 3."""
    planting = trained_here(*WINDOWED, "system.checkpoint_every=100")
    run = begin_from(new_run(planting, tmp_path, *WINDOWED, OUT, "evaluation.every=3"), Run.open(planting))
    assert run.latest_state().round == 2
    go_on_here(run)
    assert_same(run.path, trained_here(*WINDOWED, OUT, "evaluation.every=3"))


def test_sizes_of_micro_cohorts_are_those_of_shared_rounds(trained_here: Trained, tmp_path: Path) -> None:
    """Rounds count from 0. The first five are shared, so the size that the twin chose in the sixth is not copied."""
    planting = shutil.copytree(trained_here(*WINDOWED).parent, tmp_path / "twin") / "run"
    lines: list[dict[str, object]] = [{"users": 8, "memory_share": 0.9, "device": "a GPU"}]
    lines += [{"users": 4, "shard": 0, "round": at} for at in (4, 5)]
    (planting / micro_cohorts.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = begin_from(new_run(planting, tmp_path, *WINDOWED, OUT), Run.open(planting))
    copied = (run.path / micro_cohorts.FILE).read_text().splitlines()
    assert [json.loads(line) for line in copied] == lines[:2]


def test_arms_whose_users_keep_states_share_nothing(trained_here: Trained) -> None:
    """The states of users after round 5 no longer exist at round 8, so no run can start from them."""
    run = Run.open(trained_here(*WINDOWED, "training.algorithm='scaffold'"))
    assert run.parting == 0


@pytest.mark.slow
def test_the_command_starts_from_a_twin_and_leaves_nothing_if_refused(experiment: Experiment) -> None:
    """Training is central, and the log has the steps of the twin."""
    settings = WINDOWED[1:]
    experiment.config.write_text(CENTRAL)
    planting = experiment.run("in", *settings, options=["--in-process"])
    begun = experiment.run("begun", *settings, OUT, options=["--in-process", "--begin-from", str(planting)])
    whole = experiment.run("whole", *settings, OUT, options=["--in-process"])
    assert_same(begun, whole)
    logs = [[json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()] for run in (planting, begun)]
    assert [line["round"] for line in logs[1]] == list(range(1, 9))
    assert logs[1][:5] == logs[0][:5]
    assert logs[1][5:] != logs[0][5:]
    options = [part for override in settings for part in ("--set", override)]
    done = experiment.call("run", experiment.config, "--out", "bad", *options, "--begin-from", planting, check=False)
    assert (done.returncode, (experiment.folder / "bad").exists()) == (2, False)
    assert "is of arm IN and so is this run; name a run of the other arm" in done.stderr
