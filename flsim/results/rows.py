"""Rows of measurements: one number per (run, round, metric, canary), stored in one Parquet file per round.

Files are atomic. The metadata describe the quantities of custom measures, so that results can be shown without their
code. `flsim.measures.built_in` describes those of built-in measures.
"""

import json
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import AfterValidator, AliasChoices, BaseModel, Field, TypeAdapter, ValidationError, model_validator

from flsim.base import files
from flsim.base.errors import Diverged, InputError
from flsim.base.files import from_json, naming, new_file
from flsim.base.parquet import read_parquet
from flsim.base.settings import flat, refuse_other, with_present_names
from flsim.canaries.population import is_drawn, read_roster, refuse_other_run
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, select_for
from flsim.measures.quantity import from_json as described
from flsim.measures.quantity import to_json as description

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("round", pa.int64()),
        ("metric", pa.string()),
        ("canary", pa.string()),
        ("value", pa.float64()),
    ]
)
KEY = ["run", "round", "metric", "canary"]
IDENTITY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
DIVERGED = "diverged"  # the only metric of a model that is not finite; always 1
REFERENCES = "references"  # |R|, of every evaluation
WHOLE_TEST_USERS = "whole_test_users"  # metric of evaluations with complete authors as test users
ROWS = pa.schema([field.with_nullable(field.name == "value") for field in SCHEMA])
NAME = re.compile(r"round-\d{6,}\.parquet", re.ASCII)
METADATA = b"flsim.quantities"  # key in the metadata of a file: a JSON list of descriptions


def identity_of(config: str, corpus: str) -> str:
    """Return the run's name in rows: 16 digits each of the digests of its settings (with the seed) and its corpus."""
    return f"{config[:16]}-{corpus[:16]}"


@dataclass(frozen=True)
class Row:
    """A single measurement."""

    run: str  # the run's identity, see `identity_of`; for a foreign model, its name
    round: int  # number of completed rounds of the evaluated model; in central training, of steps
    # the name of a `flsim.measures.Quantity`. The model also has ``references`` (|R|). If the test users are complete
    # authors, it has ``whole_test_users``, their number. If training added noise to users' updates, it has ``delta``
    # and, for each reported convention, ``epsilon NAME``; with noise on records' gradients, ``record delta`` and
    # ``record epsilon NAME``. A model that is not finite has ``diverged`` (1) and nothing else.
    metric: str
    canary: str  # id of the canary; empty for a metric of the model
    value: float  # the number


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a table with the columns of `SCHEMA`."""
    return pd.DataFrame([asdict(row) for row in rows], columns=SCHEMA.names).astype(
        {"round": "int64", "value": "float64"}
    )


def write_rows(run_folder: Path, round: int, rows: Sequence[Row], own: Iterable[Quantity] = ()) -> None:
    """Store the measurements of one round in ``rows/round-000010.parquet``, replacing earlier rows of this round.

    Raises ValueError for no rows, those of another round or several runs, or a key twice; Diverged for a canary's value
    that is not finite. (A finite model can have infinite perplexity.)
    """
    wrong = sorted({row.round for row in rows} - {round})
    if wrong or len({row.run for row in rows}) != 1:
        raise ValueError(f"expected rows of one run and of round {round}, found {len(rows)} rows, of rounds {wrong}")
    for row in rows:
        if row.canary and not math.isfinite(row.value):
            raise Diverged(
                f"{run_folder}: {row.metric} {row.canary} of round {round} is {row.value}; rows are not stored"
            )
    table = frame(rows).sort_values(KEY)
    if table.duplicated(KEY).any():
        raise ValueError(f"{_first_duplicate(table)} is measured twice")
    path = run_folder / "rows" / f"round-{round:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    stored = pa.Table.from_pandas(table, SCHEMA, preserve_index=False)
    if descriptions := [description(quantity) for quantity in own]:
        stored = stored.replace_schema_metadata({**stored.schema.metadata, METADATA: json.dumps(descriptions)})
    with new_file(path) as partial:
        pq.write_table(stored, partial)


def copy_rows(path: Path, run_folder: Path, identity: str) -> None:
    """Store a file of rows as rows of another run with an equal model and equal canaries."""
    table = pq.read_table(path)
    named = table.set_column(0, SCHEMA.field("run"), pa.array([identity] * len(table), pa.string()))
    with new_file(run_folder / "rows" / path.name) as partial:
        pq.write_table(named, partial)


def read_rows(path: Path) -> tuple[pd.DataFrame, dict[str, Quantity]]:
    """Read a file of rows, and the quantities of custom measures by name; InputError if the file is damaged."""
    rows = read_parquet(path, ROWS)
    return rows, _described(path) if METADATA in (pq.read_schema(path).metadata or {}) else {}


def _described(path: Path) -> dict[str, Quantity]:
    try:
        quantities = [described(values) for values in from_json(pq.read_schema(path).metadata[METADATA].decode())]
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: its descriptions of measures are damaged; remove it and evaluate again") from error
    if any(quantity.name in QUANTITIES for quantity in quantities):
        raise InputError(f"{path}: the description of a built-in measure is wrong; remove the file and evaluate again")
    return {quantity.name: quantity for quantity in quantities}


def read_rows_of(path: Path, identity: str, canaries: Collection[str]) -> tuple[pd.DataFrame, dict[str, Quantity]]:
    """Read a file of a run's rows; InputError for rows of another run, round or canary, or impossible values."""
    rows, custom = read_rows(path)
    _refuse_foreign(path, rows, identity)
    if not rows["canary"].isin({"", *canaries}).all() or {f"round-{value:06d}" for value in rows["round"]} != {
        path.stem
    }:
        raise InputError(f"{path}: the file has rows of another round or canary; move it away and evaluate this round")
    if rows.duplicated(KEY).any():
        raise InputError(
            f"{path}: {_first_duplicate(rows)} occurs twice; remove the file and evaluate this round again"
        )
    if not rows.loc[rows["canary"] != "", "value"].map(math.isfinite).all():
        raise InputError(f"{path}: the file has values of canaries that are not finite; remove it and evaluate again")
    if not _can_be(rows["metric"], rows["value"], QUANTITIES | custom).all():
        raise InputError(
            f"{path}: the file has values that are invalid for their metrics; remove the file and evaluate again"
        )
    return rows, custom


def rows_in(run_folder: Path) -> list[Path]:
    """Return the files of a run's rows, by round, without files of other names."""
    return sorted(path for path in (run_folder / "rows").glob("*.parquet") if NAME.fullmatch(path.name))


def strange_rows_in(run_folder: Path) -> list[Path]:
    """Return files among the rows with other names, such as copies; flsim does not read them."""
    return sorted(path for path in (run_folder / "rows").glob("[!.]*.parquet") if not NAME.fullmatch(path.name))


def refuse_foreign_rows(run_folder: Path, identity: str) -> None:
    """Raise InputError if a run's folder has rows of another run; unreadable files are skipped."""
    for path in rows_in(run_folder):
        if is_whole(path):
            _refuse_foreign(path, read_parquet(path, ROWS), identity)


def _refuse_foreign(path: Path, rows: pd.DataFrame, identity: str) -> None:
    for other in rows.loc[rows["run"] != identity, "run"].unique():
        what, remedy = (
            f"of another run, {other!r:.60}",
            "move it away, and `flsim run --resume` evaluates the round again",
        )
        if IDENTITY.fullmatch(identity) and IDENTITY.fullmatch(other):
            what = "of a run with other settings"
            if identity.split("-")[0] == other.split("-")[0]:
                what, remedy = "measured on another corpus than that of the run", "restore the corpus of the rows"
        raise InputError(f"{path}: the file has rows {what}; {remedy}")


def _can_be(
    metric: "pd.Series[str]", value: "pd.Series[float]", quantities: Mapping[str, Quantity]
) -> "pd.Series[bool]":
    """Return whether each value is possible for its metric."""
    known = quantities.values()
    is_flag, is_positive = (
        metric.isin([one.name for one in known if getattr(one, is_)]) for is_ in ("is_flag", "is_log")
    )
    is_count = metric.isin([REFERENCES, WHOLE_TEST_USERS, *(one.name for one in known if one.kind == "count")])
    return ~(is_flag & ~value.isin([0, 1]) | is_count & (value % 1 != 0) | is_positive & (value <= 0))


def is_whole(path: Path) -> bool:
    """Return whether a file of rows can be read."""
    try:
        read_parquet(path, ROWS)
    except InputError:
        return False
    return True


def _first_duplicate(rows: pd.DataFrame) -> str:
    first = rows[rows.duplicated(KEY)].iloc[0]
    return f"{first['metric']} {first['canary']}".strip()


ON_SCREEN = select_for(QUANTITIES.values(), "screen")


def in_short(measured: "Mapping[Quantity, pd.Series[float]]", between: str = " ") -> str:
    """Return counts of memorized canaries and means of numbers, such as ``"RS 28 BS 10 11.7 bits"``."""
    return between.join(
        f"{one.heading} {(values == 1).sum()}" if one.is_flag else f"{one.format.format(values.mean())} {one.unit}"
        for one, values in measured.items()
    )


def round_in_short(run_folder: Path, round: int) -> str | None:
    """Return the results of an evaluated round and the number of planted canaries; None if they cannot be read."""
    try:
        rows, _ = read_rows(run_folder / "rows" / f"round-{round:06d}.parquet")
        roster = read_roster(run_folder / "planted" / "roster.parquet")
    except (InputError, OSError):
        return None
    of_canaries = rows[rows["canary"].isin(roster.loc[is_drawn(roster), "canary"])]
    measured = {
        quantity: values
        for quantity in ON_SCREEN
        if not (values := of_canaries.loc[of_canaries["metric"] == quantity.name, "value"]).empty
    }
    return f"{in_short(measured, ', ')} of {of_canaries['canary'].nunique()} canaries" if measured else None


# The file run.json of a run, with the setting, progress and status, and the log of evaluations.

FILE = "run.json"
SETTINGS = "config.toml"
MEASUREMENTS = "measurements.toml"  # replaces it if a model was trained elsewhere and flsim only measured it

PARTITIONS = {"iid": "IID", "non-iid": "Non-IID"}  # data.partition -> its name in a table

Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]  # fits in a column of a table


def _line(text: str) -> str:
    if not (text.isprintable() and text.strip()):
        raise ValueError("expected one line of text")
    return text


Line = Annotated[str, AfterValidator(_line)]


class RunFile(BaseModel):
    """What run.json has of `RunResults`; older files have no value for fields with a default."""

    name: Line
    setting: Line
    status: Literal["running", "completed", "diverged", "failed", "interrupted"]
    reason: str | None
    round: Whole
    rounds: Whole
    label: Line = ""
    partition: str | None = Field(None, pattern="^(iid|non-iid)$", validation_alias=AliasChoices("world", "partition"))
    rounds_per_epoch: float | None = Field(None, gt=0, allow_inf_nan=False)
    seed: Whole | None = None
    series: str | None = None
    config: str | None = None
    corpus: str | None = None

    @model_validator(mode="after")
    def _split_setting(self) -> Self:
        """Set partition and label, which older files have in one text."""
        if not self.label:
            self.label = self.setting
            for partition, name in PARTITIONS.items():
                if self.setting.startswith(f"{name}, "):
                    self.partition, self.label = partition, self.setting.removeprefix(f"{name}, ")
        return self


def is_run(folder: Path) -> bool:
    """Return whether a folder belongs to a run that has started."""
    return (folder / FILE).is_file()


def setting_of(partition: str | None, label: str) -> str:
    """Return the name of a table's row, such as ``"Non-IID, FedAvg, b_u=16"``."""
    return label if partition is None else f"{PARTITIONS[partition]}, {label}"


def read_run_file(run_folder: Path) -> dict[str, Any]:
    """Return what run.json holds of `RunResults`, and ``recorded_name``; InputError if it does not describe a run."""
    path = run_folder / FILE
    if not is_run(run_folder):
        runs = [str(folder) for folder in sorted(run_folder.glob("*")) if is_run(folder)]
        what_to_do = (
            f"name a run in it: {', '.join(runs[:4])}"
            if runs
            else "name a folder that `flsim run` or `flsim evaluate --out` wrote"
        )
        raise InputError(f"{run_folder}: not a run folder (it has no run.json); {what_to_do}")
    try:
        stored = RunFile.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: does not describe a run; restore it, or exclude this run") from error
    name = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in run_folder.resolve().name
    )
    return stored.model_dump(exclude={"setting", "config", "corpus"}) | {
        "name": name or stored.name,
        "recorded_name": stored.name,
        "identity": identity_of(stored.config, stored.corpus) if stored.config and stored.corpus else None,
    }


def read_settings(run_folder: Path) -> dict[str, Any]:
    """Return a run's settings by name, such as ``training.cohort``, or those of measurements; empty if not readable."""
    try:
        name = MEASUREMENTS if (run_folder / MEASUREMENTS).is_file() else SETTINGS
        text = (run_folder / name).read_text(encoding="utf-8")
        return dict(flat(with_present_names(tomllib.loads(text))))
    except (OSError, ValueError, RecursionError, InputError):
        return {}


def refuse_begun(path: Path) -> None:
    """Raise InputError if the folder has a run; the message explains how to continue an incomplete run."""
    if not is_run(path):
        if (path / "config.toml").is_file():
            raise InputError(
                f"{path}: this folder has a run that was killed before its first round; add --resume to start "
                "it, or name another folder"
            )
        return
    described = read_run_file(path)
    if described["status"] in {"running", "failed", "interrupted"}:
        state = "is running, or was killed," if described["status"] == "running" else f"is {described['status']},"
        raise InputError(
            f"{path}: this folder has a run that {state} after round {described['round']:,} of "
            f"{described['rounds']:,}; add --resume to continue it, or name another folder"
        )
    raise InputError(f"{path}: already exists, with a run that is {described['status']}; name another folder")


# The log of a run's evaluations, a line for each attempt that ended. Rows take precedence: an evaluation with rows has
# succeeded, independent of its lines.
EVALUATIONS = "evaluations.jsonl"
Outcome = Literal["stored", "diverged", "failed", "retried"]

Checkpoint = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Evaluation:
    """An attempt to evaluate one checkpoint."""

    checkpoint: Checkpoint  # name of the checkpoint's file, such as ``round-000010.safetensors``
    # ``stored``: the rows exist. ``diverged``: the model is not finite, and a row records this. ``failed``: only `flsim
    # run --resume` repeats it. ``retried``: the process of the evaluator was lost, and another attempt follows.
    outcome: Outcome
    attempt: int  # number of the attempt, from 1
    seconds: Finite  # wall-clock time since the evaluator got the checkpoint
    ended: Finite  # seconds since 1970, on the clock of the evaluator's machine if known
    reason: str | None = None  # one line; None if the rows are stored


EVALUATION = TypeAdapter(Evaluation)


def log_evaluation(run_folder: Path, evaluation: Evaluation) -> None:
    """Append a line about an attempt."""
    path = run_folder / EVALUATIONS
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(evaluation)) + "\n")


def read_evaluations(run_folder: Path) -> list[Evaluation]:
    """Return all attempts, in the order in which they ended, without damaged lines."""
    attempts = []
    for line in files.read_lines(run_folder / EVALUATIONS):
        try:
            attempts.append(EVALUATION.validate_python(line))
        except ValidationError:
            continue
    return attempts


def failures(run_folder: Path) -> dict[str, str]:
    """Return the reason of each checkpoint that has no rows because its last evaluation failed."""
    last = {attempt.checkpoint: attempt for attempt in read_evaluations(run_folder)}
    return {
        name: attempt.reason or ""
        for name, attempt in sorted(last.items())
        if attempt.outcome == "failed" and not (run_folder / "rows" / f"{Path(name).stem}.parquet").exists()
    }


# Results of a run on disk: one atomic Parquet file per evaluated round.
#
# Storing an equal evaluation again replaces its file with an equal file, so a repeated or interrupted evaluation adds
# nothing.


@dataclass(frozen=True, eq=False)
class RunResults:
    """The results of a run, read without checkpoints.

    Attributes:
        name: name of the run's folder.
        label: name of the training in tables, without the partition, such as ``"FedAvg, b_u=16"``.
        status: ``running``, ``completed``, ``diverged``, ``failed`` or ``interrupted``; diverged if any evaluated model
            was.
        reason: the reason why the run diverged or failed, how to continue it, the checkpoints that could not be
            evaluated, or the rounds that are missing in the log; None otherwise.
        round: number of completed rounds.
        rounds: number of rounds to train.
        rows: all measurements, with the columns of `flsim.results.rows.SCHEMA`; empty before the first evaluation.
        roster: a row per canary, planted or not, with at least its id, words and configuration.
        failures: reasons by checkpoint that could not be evaluated.
        rounds_per_epoch: number of rounds (central training: steps) per epoch; None for an older run that does not
            store it.
        seed: seed of everything in the run; None for an older run.
        series: digest that is equal for runs that differ only in their seed; None for an older run.
        identity: digest that is equal for copies of one run, see `flsim.results.rows.identity_of`; None for an older
            run.
        partition: the records of training: "iid", "non-iid", or None if records are drawn in the same way in both.
        own: quantities of custom measures, by name.
        settings: the settings of the run by name, such as ``training.cohort``; empty if the folder does not store them.
    """

    name: str
    label: str
    status: str
    reason: str | None
    round: int
    rounds: int
    rows: pd.DataFrame
    roster: pd.DataFrame
    failures: Mapping[str, str] = field(default_factory=dict)
    rounds_per_epoch: float | None = None
    seed: int | None = None
    series: str | None = None
    identity: str | None = None
    partition: str | None = None
    own: Mapping[str, Quantity] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """Return the name of the row of the run in a table, e.g. ``"Non-IID, FedAvg, b_u=16"``."""
        return setting_of(self.partition, self.label)

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the model was trained elsewhere; its rounds are then unknown."""
        return self.settings.get("training.kind") == "elsewhere"

    @property
    def prefix(self) -> int | None:
        """Number of a canary's first words that the attacker knows; None if the folder does not store it."""
        prefix = self.settings.get("evaluation.prefix")
        return prefix if isinstance(prefix, int) and 0 <= prefix < 2**63 else None

    @cached_property
    def planted(self) -> pd.DataFrame:
        """Rows of the roster of canaries that were planted; see `flsim.canaries.population.is_drawn`."""
        return self.roster[is_drawn(self.roster).to_numpy()]

    @property
    def controls(self) -> pd.DataFrame:
        """Rows of the roster of canaries that were never planted, the null control of the planted ones."""
        return self.roster[~is_drawn(self.roster).to_numpy()]

    @property
    def length(self) -> int | None:
        """Number of words of every planted canary; None if there are none, or if lengths differ."""
        lengths = {len(tokens) for tokens in self.planted["tokens"]}
        return lengths.pop() if len(lengths) == 1 else None

    def references(self, round: int) -> float | None:
        """Return the |R| of an evaluation; None if it is not stored."""
        return self.of_model(REFERENCES, round)

    def whole_test_users(self, round: int) -> float | None:
        """Return the number of complete authors on which utility was measured; None for balanced users."""
        return self.of_model(WHOLE_TEST_USERS, round)

    @cached_property
    def evaluated(self) -> list[int]:
        """Evaluated rounds, ascending."""
        return sorted(int(value) for value in self.rows["round"].unique())

    def evaluation(self, round: int | None = None) -> int:
        """Return the evaluated round to use: the given one, or the last; InputError if it was not evaluated."""
        if not self.evaluated:
            wait = "" if self.status == "diverged" else "wait for its first evaluation, or "
            raise InputError(f"run {self.name}: {self.status}, not evaluated yet; {wait}exclude it")
        if round is not None and round not in self.evaluated:
            reason = self.failures.get(f"round-{round:06d}.safetensors")
            why = f" ({reason})" if reason else ""
            raise InputError(
                f"run {self.name}: round {round} was not evaluated{why}; choose one of {_listed(self.evaluated)}"
            )
        return self.evaluated[-1] if round is None else round

    def epochs_of(self, round: int) -> float | None:
        """Return the number of epochs in this number of rounds; None for an older run that does not store it."""
        return None if self.rounds_per_epoch is None else round / self.rounds_per_epoch

    def evaluation_at_epoch(self, epochs: float) -> int:
        """Return the evaluated round nearest to this number of epochs, or InputError.

        The distance is less than a round, or less than 1% of the rounds if that is more: an epoch can end within a
        round, and within 1%, memorization changes less than from one evaluation to the next.
        """
        self.evaluation()  # raises if there is none
        if self.rounds_per_epoch is None:
            raise InputError(f"run {self.name}: an older run without stored epochs; choose a --round")
        target = epochs * self.rounds_per_epoch
        nearest = min(self.evaluated, key=lambda round_: abs(round_ - target))
        if not (math.isfinite(target) and abs(nearest - target) < max(1.0, target / 100)):
            evaluated = _listed([f"{round_ / self.rounds_per_epoch:.3g}" for round_ in self.evaluated])
            raise InputError(f"run {self.name}: was not evaluated at {epochs:g} epochs; choose one of {evaluated}")
        return nearest

    def at(self, round: int | None = None, epoch: float | None = None) -> int:
        """Return the round to use: the given one, that after these epochs, or the last; InputError if not evaluated."""
        return self.evaluation(round) if epoch is None else self.evaluation_at_epoch(epoch)

    def is_before(self, round: int | None = None, epoch: float | None = None) -> bool:
        """Return whether the last evaluation precedes the point that `at` would use."""
        last = max(self.evaluated, default=-1)
        if epoch is None:
            return round is not None and round > last
        target = epoch * (self.rounds_per_epoch or 0.0)
        return target - max(1.0, target / 100) >= last

    def of_canaries(self, metric: str, round: int, is_partial: bool = False) -> "pd.Series[float] | None":
        """Return a metric of every canary, planted or not, by id in the roster's order; None if it was not measured.

        Unless `is_partial`, missing values raise InputError, because counts and means would be misleading; otherwise
        they are NaN.
        """
        measured = self._measured(metric, round)
        at = measured[measured["canary"] != ""]
        if at.empty:
            return None
        values = pd.Series(at["value"].to_numpy(), index=at["canary"].tolist(), dtype="float64")
        measured_canaries = set(values.index)
        missing = [canary for canary in self.roster["canary"] if canary not in measured_canaries]
        if missing and not is_partial:
            raise InputError(
                f"run {self.name}, round {round}: {metric} of {len(missing)} canaries is missing, for example "
                f"{missing[0]}; evaluate this checkpoint again"
            )
        return values.reindex(self.roster["canary"].tolist())

    def of_planted(self, metric: str, round: int) -> "pd.Series[float] | None":
        """Return a metric of the planted canaries, see `of_canaries`."""
        values = self.of_canaries(metric, round)
        return None if values is None else values.loc[self.planted["canary"].tolist()]

    def of_controls(self, metric: str, round: int) -> "pd.Series[float] | None":
        """Return a metric of the canaries that were never planted, see `of_canaries`."""
        values = self.of_canaries(metric, round)
        return None if values is None else values.loc[self.controls["canary"].tolist()]

    def of_model(self, metric: str, round: int) -> float | None:
        """Return a metric of the model; None if it was not measured."""
        measured = self._measured(metric, round)
        at = measured[measured["canary"] == ""]
        return None if at.empty else float(at["value"].iloc[0])

    @cached_property
    def _places(self) -> "dict[Any, NDArray[np.intp]]":
        """Places in `rows` by metric and round."""
        groups = self.rows.groupby(["metric", "round"], sort=False, observed=True).indices
        return {key: np.asarray(places, np.intp) for key, places in groups.items()}

    def _measured(self, metric: str, round: int) -> pd.DataFrame:
        """Return the rows of a metric and round, in their order, without a search in all rows."""
        return self.rows.iloc[self._places.get((metric, round), [])]


def refuse_two_points(round: int | None, epoch: float | None) -> None:
    """Raise InputError if both a round and an epoch are given, or if one is of another type."""
    refuse_other(Integral | None, "an integer", round=round)
    refuse_other(Real | None, "a number", epoch=epoch)
    if round is not None and epoch is not None:
        raise InputError("--round and --epoch: both set a point in training; use only one of them")


def read_run(run_folder: Path) -> RunResults:
    """Return the results of a run; InputError if the folder is not a run, or a file is damaged or of another run."""
    described = read_run_file(run_folder)
    refuse_other_run(run_folder / "planted", described["identity"])
    roster = read_roster(run_folder / "planted" / "roster.parquet")
    tables, custom = [SCHEMA.empty_table().to_pandas()], dict[str, Quantity]()
    recorded_name = described.pop("recorded_name")
    for path in rows_in(run_folder):
        rows, quantities = read_rows_of(path, described["identity"] or recorded_name, roster["canary"].tolist())
        for name, quantity in quantities.items():
            if not custom.setdefault(name, quantity).is_like(quantity):
                raise InputError(
                    f"{path}: the description of {name} differs from that of an earlier round; evaluate all "
                    "rounds again"
                )
        custom |= quantities
        tables.append(rows)
    rows = pd.concat(tables[1:] or tables, ignore_index=True)
    diverged = rows["metric"] == DIVERGED
    if diverged.any():
        reason = f"the model of round {rows.loc[diverged, 'round'].min()} is not finite"
        described |= {
            "status": "diverged",
            "reason": described["reason"] if described["status"] == "diverged" else reason,
        }
    return RunResults(
        **described,
        rows=rows[~diverged].reset_index(drop=True),
        roster=roster,
        failures=failures(run_folder),
        own=custom,
        settings=read_settings(run_folder),
    )


def _listed(values: Sequence[object]) -> str:
    shortened = values if len(values) < 10 else [*values[:4], "...", *values[-4:]]
    return ", ".join(map(str, shortened))
