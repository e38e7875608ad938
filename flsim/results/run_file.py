"""The file run.json of a run, with the setting, progress and status, and the log of evaluations."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from flsim.base import files
from flsim.base.errors import InputError
from flsim.base.files import from_json, naming
from flsim.base.mappings import flat, with_present_names
from flsim.results.rows import identity_of

FILE = "run.json"
SETTINGS = "config.toml"
MEASUREMENTS = "measurements.toml"  # replaces it if a model was trained elsewhere and flsim only measured it
STATUSES = ("running", "completed", "diverged", "failed", "interrupted")
PARTITIONS = {"iid": "IID", "non-iid": "Non-IID"}  # data.partition -> its name in a table


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
        described = from_json(path.read_text(encoding="utf-8"))
        recorded, setting, status, reason = (described[name] for name in ("name", "setting", "status", "reason"))
        if not (_is_line(recorded) and _is_line(setting) and recorded and setting.strip() and status in STATUSES):
            raise ValueError
        name = run_folder.resolve().name
        name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
        partition, label = _partition_and_label(described)
        return _read_later(described) | {
            "name": name or recorded,
            "recorded_name": recorded,
            "label": label,
            "partition": partition,
            "status": status,
            "reason": None if reason is None else _text(reason),
            "round": _whole(described["round"]),
            "rounds": _whole(described["rounds"]),
        }
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(f"{path}: does not describe a run; restore it, or exclude this run") from error


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


def _partition_and_label(described: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the partition and the name of the training, which older files have in one text; ValueError if wrong."""
    if "label" not in described:
        setting: str = described["setting"]
        partitions = [partition for partition, name in PARTITIONS.items() if setting.startswith(f"{name}, ")]
        return (
            (partitions[0], setting.removeprefix(f"{PARTITIONS[partitions[0]]}, ")) if partitions else (None, setting)
        )
    # older runs use another key
    partition, label = described["world" if "world" in described else "partition"], described["label"]
    if not (partition is None or partition in PARTITIONS) or not _is_line(label) or not label.strip():
        raise ValueError
    return partition, label


def _read_later(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that only newer files have; missing fields are None. ValueError if a value does not fit."""
    per_epoch, seed, series = (described.get(name) for name in ("rounds_per_epoch", "seed", "series"))
    config, corpus = (described.get(name) for name in ("config", "corpus"))
    if per_epoch is not None and not 0 < float(per_epoch) < math.inf:
        raise ValueError
    return {
        "rounds_per_epoch": None if per_epoch is None else float(per_epoch),
        "seed": None if seed is None else _whole(seed),
        "series": None if series is None else _text(series),
        "identity": identity_of(_text(config), _text(corpus)) if config and corpus else None,
    }


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _whole(value: Any) -> int:
    """Return a number that fits in a column of a table; raise like `int`, and ValueError beyond int64."""
    number = int(value)
    if abs(number) >= 2**63:
        raise ValueError
    return number


def _text(value: Any) -> str:
    """Return the value as text; raise UnicodeEncodeError if it cannot be written."""
    text = str(value)
    text.encode()
    return text


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
    cpu_seconds: Finite | None = None  # processor time with the start of the process; None if the process was lost
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
