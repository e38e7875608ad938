"""TensorBoard, MLflow and Weights & Biases as trackers of a run's rounds and evaluations.

For each tracker, a thread of the driver reads rounds.jsonl and rows/, so training does not wait for it, and a failed
tracker stops nothing. A resumed run continues the same run of a tracker, and reports each number once: TensorBoard gets
all numbers again and drops the previous numbers; MLflow and Weights & Biases store the last reported rounds, as
``train/round`` and ``eval/round``. No earlier session's files are removed.

RUN/tensorboard/    events
RUN/mlflow/         run_id; mlflow.db, unless MLFLOW_TRACKING_URI names another store
RUN/wandb/          run_id; a folder per session. Offline unless WANDB_MODE or a login changes this
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, Protocol

import pandas as pd

from flsim.base.errors import InputError
from flsim.base.files import NewLines, naming
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.base.settings import flat
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, flags
from flsim.results.rows import read_rows, rows_in
from flsim.runs import roundlog

Kind = Literal["tensorboard", "mlflow", "wandb"]
Settings = Mapping[str, Any]

LOOK = 2.0  # seconds between two reads of the folder
PATIENCE = 60.0  # seconds that the end of a run waits for trackers
# name of the experiment in MLflow and the project in Weights & Biases, unless settings of the user name them
PROJECT = "flsim"


class Tracker(Protocol):
    """Interface of a tracker, which is created from a run folder and its settings by name."""

    def log(self, values: Mapping[str, float], round_: int) -> None:
        """Report numbers of a round by tag (``train/loss``, ``eval/rs``); repeated reports have no effect."""

    def close(self, is_completed: bool) -> None:
        """Return once everything is stored or sent."""


class TensorBoard:
    def __init__(self, path: Path, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: TensorBoard ignores older files of earlier sessions, which remain next to the new file.
        self._writer = SummaryWriter(str(path / "tensorboard"), purge_step=0, flush_secs=10)
        lines = [f"| `{name}` | {value} |" for name, value in settings.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *lines]), 0)

    def log(self, values: Mapping[str, float], round_: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, round_)

    def close(self, is_completed: bool) -> None:  # noqa: ARG002 (TensorBoard has no status)
        self._writer.close()


class MLflow:
    """Tracker for MLflow, with a client, because the functions of `mlflow` change the store of the complete process."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Continue the MLflow run of a run folder, or create one."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        folder = path.resolve() / "mlflow"
        folder.mkdir(exist_ok=True)
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client = client = MlflowClient(tracking_uri=uri)
        try:
            known = client.get_run((folder / "run_id").read_text().strip())
        except (OSError, MlflowException):  # there is no run yet, or it is in another store
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            with suppress(MlflowException):  # it exists
                client.create_experiment(experiment, artifacts)
            known = client.create_run(client.get_experiment_by_name(experiment).experiment_id, run_name=path.name)
            (folder / "run_id").write_text(known.info.run_id)
        self._id = known.info.run_id
        client.update_run(self._id, status="RUNNING")
        self._last = dict(known.data.metrics)
        # a parameter cannot change, so those of a resumed run are those of its start
        new = [Param(name, str(value)) for name, value in settings.items() if name not in known.data.params]
        for first in range(0, len(new), 100):  # largest number per request
            client.log_batch(self._id, params=new[first : first + 100])

    def log(self, values: Mapping[str, float], round_: int) -> None:
        from mlflow.entities import Metric

        tag, now = _round_tag(values), int(time.time() * 1000)
        if round_ > self._last.get(tag, 0):
            metrics = [Metric(name, value, now, round_) for name, value in {tag: round_, **values}.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def close(self, is_completed: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_completed else "FAILED")


class WeightsAndBiases:
    """Tracker for Weights & Biases; offline, a session's folder is complete, so everything is reported again."""

    def __init__(self, path: Path, settings: Settings) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import requests
        import wandb

        folder = path.resolve() / "wandb"
        folder.mkdir(exist_ok=True)
        name = ((folder / "run_id").read_text().strip() or None) if (folder / "run_id").exists() else None
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        has_login = bool(os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(server))
        mode: Any = os.environ.get("WANDB_MODE") or (None if has_login else "offline")
        earlier_sessions = list(folder.glob("offline-run-*"))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=name,
            resume=None if mode == "offline" else "allow",
            reinit="create_new",  # a process can train several runs, for example in the demo
            name=path.name,
            dir=path.resolve(),
            mode=mode,
            config=dict(settings),
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True,
                login_timeout=PATIENCE,  # nobody may be there to answer
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        (folder / "run_id").write_text(self._run.id)
        for session in earlier_sessions:
            if session != Path(self._run.dir).parent:
                session.rename(session.with_name(f"replaced-{session.name}"))  # `wandb sync --sync-all` skips it
        for part in ("train", "eval"):
            self._run.define_metric(f"{part}/round")
            self._run.define_metric(f"{part}/*", step_metric=f"{part}/round")
        self._last = {tag: self._run.summary.get(tag, 0) for tag in ("train/round", "eval/round")}

    def log(self, values: Mapping[str, float], round_: int) -> None:
        tag = _round_tag(values)
        if round_ > self._last[tag]:
            self._run.log({tag: round_, **values})

    def close(self, is_completed: bool) -> None:
        self._run.finish(exit_code=int(not is_completed))


TRACKERS: dict[Kind, Callable[[Path, Settings], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def refuse_missing(kinds: Sequence[Kind]) -> None:
    for kind in kinds:
        if find_spec(kind) is None:
            package = "mlflow-skinny" if kind == "mlflow" else kind
            raise InputError(
                f'system.tracking: "{kind}" needs a package that is not installed; pip install {package}, or leave it '
                f"out"
            )


@contextmanager
def tracking(path: Path, kinds: Sequence[Kind], settings: Settings) -> Iterator[None]:
    """Report the content of a run folder to trackers, and additions during the block."""
    ended = Event()
    threads = {
        kind: Thread(target=_track, args=(kind, path, settings, ended), name=f"tracking by {kind}", daemon=True)
        for kind in kinds
    }
    for thread in threads.values():
        thread.start()
    try:
        yield
    finally:
        ended.set()
        until = time.monotonic() + PATIENCE
        for kind, thread in threads.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                say(f"{path.name}: tracking by {kind} did not finish within {PATIENCE:g} s and was stopped")


def _track(kind: Kind, path: Path, settings: Settings, ended: Event) -> None:
    try:
        with naming(path / kind):  # each tracker has a folder with its name
            tracker, news, is_last = TRACKERS[kind](path, settings), News(path), False
            while not is_last:
                is_last = ended.is_set()
                for values, round_ in news.take():
                    tracker.log(values, round_)
                ended.wait(LOOK)
            tracker.close(json.loads((path / "run.json").read_text(encoding="utf-8"))["status"] == "completed")
    except Exception as error:
        reason = " ".join(str(error).split()) or repr(error)
        say(f"{path.name}: tracking by {kind} failed, and the run continues without it: {reason}")
        log.warning("tracking failed", extra={"tracker": kind, "reason": reason})


class News:
    """Reader of a run's folder that returns each number once, even if a round is trained again."""

    def __init__(self, path: Path) -> None:
        self._path, self._round, self._evaluated = path, 0, set[Path]()
        self._lines = NewLines(path / roundlog.FILE)

    def take(self) -> Iterator[tuple[dict[str, float], int]]:
        """Yield new numbers by tag with their round, first those of rounds, then those of evaluations."""
        for line in roundlog.rounds_among(self._lines.take()):
            if line["round"] <= self._round:  # after a fault, lines are written again
                continue
            self._round = line["round"]
            yield of_round(line), self._round
        for path in sorted({*rows_in(self._path)} - self._evaluated):
            self._evaluated.add(path)
            rows, custom = read_rows(path)
            yield of_evaluation(rows, custom), int(rows["round"].iloc[0])


def of_round(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of rounds.jsonl by tag, with users or records per second."""
    values = dict(flat({name: value for name, value in line.items() if name != "round"}, " "))
    for what in ("users", "records"):
        if what in values and values.get("seconds"):
            values[f"{what} per second"] = values[what] / values["seconds"]
    return {f"train/{name}": value for name, value in values.items() if isinstance(value, int | float)}


def of_evaluation(rows: pd.DataFrame, own: Mapping[str, Quantity]) -> dict[str, float]:
    """Return a round's rows as numbers by tag: of the model, counts of flags of canaries, and means of numbers."""
    known = {**QUANTITIES, **own}
    counted = {flag.name for flag in flags(known.values()) if not flag.is_partial}
    is_of_model = rows["canary"] == ""
    values = dict(zip(rows["metric"][is_of_model], rows["value"][is_of_model], strict=True))
    for metric, of_canaries in rows[~is_of_model].groupby("metric")["value"]:
        is_count = metric in counted
        values[metric if is_count else f"mean {metric}"] = of_canaries.sum() if is_count else of_canaries.mean()
    return {f"eval/{name}": float(value) for name, value in values.items()}


def _round_tag(values: Mapping[str, float]) -> str:
    """Return the tag of the round of these values: "train/round" or "eval/round"."""
    return f"{next(iter(values)).partition('/')[0]}/round"
