"""Files of trackers have the values of rounds.jsonl and of rows, also if a run is killed or a tracker fails."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Experiment
from waiting import wait_until

from flsim.algorithms import checkpoint
from flsim.base.errors import InputError
from flsim.base.settings import flat
from flsim.results.rows import read_run
from flsim.results.tables import memorization_table
from flsim.runs import config, roundlog
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.runs.trackers import News
from server import central as central_server
from server.central import supervised
from server.pool.grid import EvaluationService

ALL = ("tensorboard", "mlflow", "wandb")
Scalars = dict[str, dict[int, list[float]]]  # tag -> round -> values, each as often as it occurs


def of_tensorboard(run: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: Scalars = {}
    if (run / "tensorboard").exists():
        events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            for entry in events.Scalars(tag):
                scalars.setdefault(tag, {}).setdefault(entry.step, []).append(entry.value)
    return scalars


def of_mlflow(run: Path) -> Scalars:
    from mlflow import MlflowClient

    scalars: Scalars = {}
    if (run / "mlflow" / "run_id").exists():
        client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
        known = client.get_run((run / "mlflow" / "run_id").read_text())
        for tag in known.data.metrics:
            for entry in client.get_metric_history(known.info.run_id, tag):
                scalars.setdefault(tag, {}).setdefault(entry.step, []).append(entry.value)
    return scalars


def of_wandb(run: Path) -> Scalars:
    """Return the history in the one folder that would be synchronized."""
    from wandb.proto.wandb_internal_pb2 import Record

    scalars: Scalars = {}
    folders = list((run / "wandb").glob("offline-run-*"))
    for record in records(next(folders[0].glob("*.wandb"))) if folders else ():
        history = Record.FromString(record).history
        items = {(entry.key or ".".join(entry.nested_key)): json.loads(entry.value_json) for entry in history.item}
        for round_ in [value for tag, value in items.items() if tag.endswith("/round")]:
            for tag, value in items.items():
                if "/" in tag:
                    scalars.setdefault(tag, {}).setdefault(round_, []).append(float(value))
    assert len(folders) <= 1
    return scalars


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a LevelDB log: blocks of 32 KiB, of chunks with a header of checksum, length and type."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if not kind:  # not written yet
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or its last part
            yield whole
            whole = b""


pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # of MLflow


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.fixture
def make(experiment: Experiment) -> Callable[..., Run]:
    """Return a function that creates a run of 8 rounds, saved every second and evaluated every fourth round."""

    def make(name: str, kinds: tuple[str, ...] = ALL, *overrides: str) -> Run:
        changed = ("training.rounds=8", "evaluation.every=4", "system.checkpoint_every=2", *overrides)
        settings = config.load(experiment.config, (*changed, f"system.tracking={list(kinds)}"))
        return Run.create(settings, experiment.folder / name)

    return make


def line_of(round_: int) -> dict[str, Any]:
    spent = {"paper": round_ / 7, "replace-one-rdp": 2.0 * round_} if round_ % 4 == 0 else None
    return {"round": round_, "loss": 1 / round_, "users": 6, "clip": None, "epsilon": spent, "seconds": 0.5}


def simulate(run: Run, last: int = 8, after: Callable[[int], None] = lambda _: None) -> None:
    """Write rounds from the newest checkpoint on, as the server does, but without clients; Ray is not needed."""
    with supervised(run, service=EvaluationService(run.path, evaluate_checkpoint)):
        state = run.latest_state()
        for round_ in range(state.round + 1, last + 1):
            run.log_round(**line_of(round_), workers=["node/1"])
            if run.is_saved_at(round_):
                path = run.save(replace(state, round=round_))
                if run.is_evaluated_at(round_):
                    evaluate_checkpoint(run.path, path)
            after(round_)


def simulate_and_die(path: Path) -> None:
    """Simulate until trackers have all of round 7, which is after the newest checkpoint, and kill this process."""

    def after(round_: int) -> None:
        if round_ == 7:
            wait_until(lambda: 7 in of_tensorboard(path).get("train/seconds", {}))
            wait_until(lambda: 7 in of_mlflow(path).get("train/seconds", {}))
            os.kill(os.getpid(), signal.SIGKILL)

    simulate(Run.open(path), after=after)


def expected(run: Path) -> dict[str, dict[int, float]]:
    """Return the values of rounds.jsonl and of rows, the latter from the table."""
    found: dict[str, dict[int, float]] = {}
    for text in (run / "rounds.jsonl").read_text().splitlines():
        line = json.loads(text)
        for name, value in flat(line, " "):
            if name not in ("round", "workers", "digest"):
                found.setdefault(f"train/{name}", {})[line["round"]] = value
        what = "users" if "users" in line else "records"
        found.setdefault(f"train/{what} per second", {})[line["round"]] = line[what] / line["seconds"]
    results = read_run(run)
    for round_ in results.evaluated:
        row = memorization_table([results], round_).iloc[0]
        names = {"rs": "rs", "bs": "bs", "mean_exposure": "mean exposure", "epsilon_sound": "epsilon poisson-rdp"}
        names |= {name: name for name in ("accuracy", "perplexity", "references", "delta")}
        for column, name in names.items():
            if column in row:
                found.setdefault(f"eval/{name}", {})[round_] = float(row[column])
    return found


def assert_says(run: Path, kinds: Sequence[str] = ALL) -> None:
    """Require that each tracker has each number once; those of TensorBoard have single precision."""
    truth = expected(run)
    readers = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
    for kind in kinds:
        found = readers[kind](run)
        assert truth.keys() <= found.keys(), kind
        for tag, by_round in truth.items():
            assert {round_: len(values) for round_, values in found[tag].items()} == dict.fromkeys(by_round, 1), tag
            for round_, value in by_round.items():
                kept = np.float32(value) if kind == "tensorboard" else value
                assert found[tag][round_] == [kept], (kind, tag, round_)


@pytest.mark.nightly
def test_a_killed_run_that_resumes_with_more_rounds_is_tracked_once(make: Callable[..., Run]) -> None:
    from mlflow import MlflowClient

    broken, whole = make("broken"), make("whole", ("tensorboard",), "training.rounds=12")
    code = f"from pathlib import Path; import test_tracking; test_tracking.simulate_and_die(Path({str(broken.path)!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    newest = checkpoint.latest(broken.path / "checkpoints")
    assert newest is not None
    assert checkpoint.round_of(newest) == 6
    longer = Run.reopen(replace(broken.federated, training=whole.federated.training), broken.path)
    for run in (longer, whole):
        simulate(run, last=12)
    assert_says(broken.path)
    assert of_tensorboard(broken.path) == of_tensorboard(whole.path)
    assert sorted(expected(broken.path)["train/loss"]) == list(range(1, 13))
    assert sorted(expected(broken.path)["eval/perplexity"]) == [4, 8, 12]
    client = MlflowClient(tracking_uri=f"sqlite:///{broken.path / 'mlflow' / 'mlflow.db'}")
    about = client.get_run((broken.path / "mlflow" / "run_id").read_text()).data
    assert about.params["training.rounds"] == "8"  # MLflow cannot change a parameter


def test_steps_of_central_training_are_tracked_as_they_are_saved(experiment: Experiment) -> None:
    experiment.config.write_text(experiment.config.read_text().partition("[training]")[0])
    central = ("training.kind=central", "training.steps=20", "training.batch_size=9", "evaluation.references=100")
    settings = config.load(experiment.config, (*central, "evaluation.every=10", "system.checkpoint_every=7"))
    run = Run.create(settings, experiment.folder / "central")
    with supervised(run, service=EvaluationService(run.path, evaluate_checkpoint)):
        for news in central_server.train(run.path, gpus=0.0):
            if news.saved and run.is_evaluated_at(news.step):
                evaluate_checkpoint(run.path, run.path / "checkpoints" / checkpoint.checkpoint_name(news.step))
    assert_says(run.path, ("tensorboard",))
    assert sorted(expected(run.path)["train/records per second"]) == [7, 10, 14, 20]


def test_tensorboard_is_the_default_and_no_part_of_a_digest(experiment: Experiment) -> None:
    settings = config.load(experiment.config)
    assert settings.system.tracking == ("tensorboard",)
    assert settings.digest == config.load(experiment.config, ["system.tracking=[]"]).digest
    with pytest.raises(InputError, match=r"system\.tracking must be 'tensorboard', 'mlflow' or 'wandb'"):
        config.load(experiment.config, ["system.tracking=['comet']"])


def test_trackers_that_fail_at_the_start_do_not_stop_the_run(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make("run")
    (run.path / "tensorboard").write_text("a file where a folder should be")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("WANDB_MODE", "online")
    simulate(run)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "the run continues without it" in line]
    assert sorted(line.split()[3] for line in lines) == sorted(ALL)
    assert json.loads((run.path / "run.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("kind", ALL)
def test_a_missing_package_is_reported_before_the_run_exists(
    make: Callable[..., Run], kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    package = {"mlflow": "mlflow-skinny"}.get(kind, kind)
    with pytest.raises(InputError, match=rf'^system\.tracking: "{kind}" needs .*; pip install {package}, or leave it'):
        make("run", (kind,))
    assert not (tmp_path / "run").exists()


def test_news_have_each_round_once_also_if_it_is_trained_again(make: Callable[..., Run]) -> None:
    """A line is news only once it is complete."""
    run = make("run", ())
    news = News(run.path)
    assert not list(news.take())
    for round_ in (1, 2, 3):
        run.log_round(**line_of(round_))
    with (run.path / "rounds.jsonl").open("a") as log:
        log.write('{"round": 4, "lo')
    assert [round_ for _, round_ in news.take()] == [1, 2, 3]
    roundlog.copy(run.path, run.path, 1)
    for round_ in (2, 3, 4):
        run.log_round(**line_of(round_))
    assert [(values["train/loss"], round_) for values, round_ in news.take()] == [(0.25, 4)]
    assert not list(news.take())
