"""Readers of the files that trackers write."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

ALL = ("tensorboard", "mlflow", "wandb")
FOLDERS = set(ALL)
Scalars = dict[str, dict[int, list[float]]]  # tag -> round -> values, each as often as it is there


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
    """The history in the one folder that would be synchronized."""
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
        if kind in (1, 4):  # the whole, or the last part
            yield whole
            whole = b""
