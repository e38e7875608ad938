"""Readers get 3,000 damaged files each, and 3,000 damaged records: they return posts or one line, never a traceback."""

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fuzzing import outcome
from reading import check_post, damaged, read

from benchmarks import writers
from flsim.base.rng import stream

CASES = 3_000
MEMORY = Path("/dev/shm")
FUZZING = Path(__file__).parents[2] / "support" / "fuzzing.py"
EXAMPLES = [(split, user, f"{user} says a / b . {n}") for split in ("train", "test") for user in "ab" for n in range(2)]
TRAIN = [example for example in EXAMPLES if example[0] == "train"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Provide a folder in memory if possible, because the tests write thousands of files."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


def write_valid(path: Path, format: str) -> None:
    match format:
        case "tff-sqlite":
            writers.write_tff_sqlite(path, EXAMPLES)
        case "tff-hdf5":
            writers.write_tff_hdf5(path, TRAIN)
        case "parquet":
            writers.write_parquet(path, EXAMPLES)
        case "jsonl":
            writers.write_jsonl(path, EXAMPLES)
        case "json":
            path.write_text(json.dumps([{"user": user, "text": text} for _, user, text in EXAMPLES], indent=1))
        case "stackexchange":
            writers.write_stackexchange(path, EXAMPLES)
    assert read(path, format)[0]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["tff-sqlite", "parquet", "jsonl", "json", "stackexchange"])
def test_damaged_files(folder: Path, format: str) -> None:
    write_valid(folder / "valid", format)
    content = (folder / "valid").read_bytes()
    seen = Counter(outcome(content, folder / "damaged", format, case) for case in range(CASES))
    assert seen["refused"] > CASES // 20
    assert seen["read"] + seen["dropped"] > CASES // 20


@pytest.mark.nightly
@pytest.mark.parametrize(("fixed_length", "cases"), [(True, 8_000), (False, 2_000)])
def test_damaged_hdf5_files(folder: Path, fixed_length: bool, cases: int) -> None:
    """Fewer than 2% of damaged files crash libhdf5, or loop in a damaged heap of strings; flsim cannot prevent this."""
    writers.write_tff_hdf5(folder / "valid", TRAIN, fixed_length)
    seen: Counter[str] = Counter()
    case = 0
    while case < cases:
        command = [sys.executable, str(FUZZING), str(folder), "tff-hdf5", str(case), str(cases)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode <= 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        seen.update(line[1] for line in lines if len(line) == 2)
        seen["crashed"] += done.returncode < 0
        case = int(lines[-1][0]) + 1
    assert seen.total() == cases
    assert seen["crashed"] < cases * 0.02
    assert seen["refused"] > cases // 20
    assert seen["read"] + seen["dropped"] > cases // 20


def test_damaged_tf_examples(folder: Path) -> None:
    """A damaged record is read as a sentence or dropped for a counted reason; the intact last record is always read."""
    protos = [writers.tf_example(f"the {n} words") for n in range(50)]
    reasons: Counter[str] = Counter()
    for file in range(CASES // 1_000):
        rng = stream(0, "fuzz tf.Example", file)
        rows = [damaged(protos[n % 50], rng) for n in range(1_000)]
        path = folder / f"{file}.sqlite"
        writers.write_tff_sqlite(path, [])
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.executemany("INSERT INTO examples VALUES ('train', 'a', ?)", [(row,) for row in rows])
            connection.execute("INSERT INTO examples VALUES ('train', 'b', ?)", (protos[0],))
        posts, dropped = read(path, "tff-sqlite")
        for post in posts:
            check_post(post)
        assert sum(len(post.sentences) for post in posts) + dropped.total() == 1_001
        assert (posts[-1].user, posts[-1].sentences) == ("b", ["the 0 words"])
        reasons += dropped
    assert reasons["records_not_tf_example"] > CASES // 20
    assert reasons["records_without_tokens"]
    assert reasons["records_not_utf8"]
