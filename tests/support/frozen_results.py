"""Results of three small sweeps as data frames, and the files in `tests/frozen` that hold them.

Each sweep `NAME.toml` was trained once. `NAME.zip` contains its runs: settings, rows, rosters, rounds, the last
checkpoint and the corpus. `NAME/FRAME.csv` contains what flsim computes from these runs. The numbers are not known to
be right, but they must not change when only the program changes. After a change that changes numbers on purpose, this
command trains again and replaces all files:

    .venv/bin/python tests/support/frozen_results.py
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from zipfile import ZIP_LZMA, ZipFile, ZipInfo

import numpy as np
import pandas as pd
import tomli_w

import flsim

FROZEN = Path(__file__).parents[1] / "frozen"
SWEEPS = ("worlds", "private", "forgetting")
EXACT, OF_MODELS = 1e-9, 1e-4  # relative differences; models compute in float32, whose sums depend on the processor
TOLERANCE = {
    "private/audit": OF_MODELS,
    **{f"forgetting/extract-{table}": OF_MODELS for table in ("strings", "rates", "eidetic", "seeds")},
    "private/membership": 1e-3,  # two records with nearly equal scores may swap ranks, which changes a rate
}
UNREAD = {"configs", "logs", "tensorboard", "report.html", "log.jsonl", "README"}  # files that frames do not need


def frames_of(name: str, folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the content of each data frame that flsim computes from an unpacked sweep."""
    runs = folder / "runs"
    yield "table", flsim.table(folder)
    if name == "worlds":
        of_runs, of_canaries = flsim.frames(folder)
        yield "runs", of_runs
        yield "canaries", of_canaries
        compared = flsim.compare(runs / "fedavg-iid-seed0", runs / "fedavg-non-iid-seed0")
        yield "compare-two-runs", compared.table
        yield "compare-two-models", compared.models
        yield "compare-pairs", flsim.compare(folder).table
    if name == "private":
        yield "audit", flsim.audit(folder)
        attacked = flsim.infer_membership(folder, records=200)
        yield "membership", attacked[[column for column in attacked if not str(column).startswith("curve_")]]  # lists
    if name == "forgetting":
        for label, by_hardness in (("", False), ("-by-hardness", True)):
            forgotten = flsim.measure_forgetting(folder, by_hardness=by_hardness)
            yield f"forgetting-success{label}", forgotten.success
            yield f"forgetting-times{label}", forgotten.times
            yield f"forgetting-tests{label}", forgotten.tests
        extracted = flsim.extract(runs / "poison-in-seed0", runs / "poison-in-seed1", prefixes=[1, 3], records=25)
        yield "extract-strings", extracted.strings
        yield "extract-rates", extracted.rates
        yield "extract-eidetic", extracted.eidetic
        yield "extract-seeds", extracted.over_seeds


def unpack(name: str, into: Path) -> Path:
    """Unpack the runs of a sweep into a subfolder of a folder, and return the subfolder."""
    with ZipFile(FROZEN / f"{name}.zip") as archive:
        archive.extractall(into / name)
    return into / name


def text_of(frame: pd.DataFrame, folder: Path) -> str:
    """Return a frame as CSV, with paths below `folder` as paths relative to it."""
    return frame.to_csv(index=False).replace(f"{folder}/", "")


def read(text: str) -> pd.DataFrame:
    """Return CSV as a frame: flags as the float64 values 0 and 1, numbers as numbers, and all else as strings."""
    table = pd.read_csv(StringIO(text))
    for column in table:
        if set(table[column].dropna().astype(str)) <= {"True", "False"}:
            table[column] = table[column].astype(str).map({"True": 1.0, "False": 0.0})
    return table


def assert_equal(found: pd.DataFrame, frozen: pd.DataFrame, tolerance: float, label: str) -> None:
    """Check numbers and flags to a relative tolerance, and which rows have equal text, because its wording may change.

    The found frame may have more columns, and columns in another order.
    """
    assert len(found) == len(frozen), label
    for column in frozen:
        assert column in found, f"{label} has no column {column}"
        if frozen[column].dtype.kind in "fi":
            values, expected = (table[column].to_numpy("float64") for table in (found, frozen))
            np.testing.assert_allclose(values, expected, rtol=tolerance, atol=0, err_msg=f"{label}: {column}")
        else:
            of_rows, of_frozen = (pd.factorize(table[column])[0].tolist() for table in (found, frozen))
            assert of_rows == of_frozen, f"{label}: other rows have an equal {column}"


def _pack(sweep: Path, out: Path) -> None:
    """Pack the files of a trained sweep that frames need, with the path of the corpus relative to the run folder."""
    newest = {max(folder.iterdir()) for folder in sweep.glob("runs/*/checkpoints")}
    with ZipFile(out, "w", ZIP_LZMA) as archive:
        for path in sorted(path for path in sweep.rglob("*") if path.is_file()):
            inside = path.relative_to(sweep)
            is_old = path.parent.name == "checkpoints" and path not in newest
            if is_old or path.name.startswith(".") or UNREAD & set(inside.parts):
                continue
            content = path.read_bytes()
            if path.name == "config.toml":
                settings = tomllib.loads(content.decode())
                settings["data"]["corpus"] = "../../corpus"
                content = tomli_w.dumps(settings).encode()
            if path.name == "sweep.json":
                content = content.replace(bytes(sweep), b"runs/frozen").replace(bytes(FROZEN), b"tests/frozen")
            archive.writestr(ZipInfo(str(inside)), content, ZIP_LZMA)


def _freeze(name: str) -> None:
    """Train a sweep, and replace its files."""
    with tempfile.TemporaryDirectory() as folder:
        _flsim("sweep", str(FROZEN / f"{name}.toml"), "--out", f"{folder}/trained")
        _pack(Path(folder, "trained"), FROZEN / f"{name}.zip")
        shutil.rmtree(FROZEN / name, ignore_errors=True)
        (FROZEN / name).mkdir()
        for label, frame in frames_of(name, unpack(name, Path(folder))):
            (FROZEN / name / f"{label}.csv").write_text(text_of(frame, Path(folder, name)), encoding="utf-8")


def _flsim(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "flsim", *arguments], check=True)


if __name__ == "__main__":
    for each in sys.argv[1:] or SWEEPS:
        _freeze(each)
