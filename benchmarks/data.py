"""Benchmark of the import from every format: sentences per second, and peak memory at two sizes.

Files hold generated sentences in the format's true schema (`benchmarks.writers`). Users have 400 sentences, the mean of
Stack Overflow's train users. Sentences have 5 to 19 words from a Zipf law, and each twentieth has a rare word. The
files are written before the measurement, which covers `flsim data import` from the start of the command to its exit.
"""

import lzma
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import writers
from flsim.base.errors import InputError, RunFailed
from flsim.base.machine import PeakMemory
from flsim.base.progress import say
from flsim.base.rng import stream

SENTENCES = 2_000_000
SMALLER = 4  # factor of fewer sentences, to measure the growth of memory
PER_USER = 400
DIFFERENT = 100_000  # sentences
WORDS = 50_000  # of the Zipf law
RARE = 20  # one in so many sentences has a unique word


def _write_lzma(path: Path, examples: writers.Examples) -> None:
    plain = path.with_suffix("")
    writers.write_tff_sqlite(plain, examples)
    with plain.open("rb") as source, lzma.open(path, "wb", format=lzma.FORMAT_ALONE, preset=0) as packed:
        shutil.copyfileobj(source, packed, 2**20)
    plain.unlink()


def _write_json(path: Path, examples: writers.Examples) -> None:
    """Write the lines of JSON as one array."""
    writers.write_jsonl(path, examples)
    path.write_text(f"[{','.join(path.read_text(encoding='utf-8').splitlines())}]", encoding="utf-8")


FILES: dict[str, tuple[str, Callable[[Path, writers.Examples], None]]] = {
    "tff-sqlite": ("stackoverflow.sqlite", writers.write_tff_sqlite),
    "tff-sqlite, lzma": ("stackoverflow.sqlite.lzma", _write_lzma),
    "tff-hdf5": ("stackoverflow_train.h5", writers.write_tff_hdf5),
    "parquet": ("stackoverflow.parquet", writers.write_parquet),
    "jsonl": ("stackoverflow.jsonl", writers.write_jsonl),
    "json": ("stackoverflow.json", _write_json),
    "csv": ("stackoverflow.csv", writers.write_csv),
    "text": ("stackoverflow.txt", writers.write_text),
    "stackexchange": ("stackoverflow.Posts.xml", writers.write_stackexchange),
}


def bench_data(sentences: int = SENTENCES, readers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Import generated files of each format.

    Args:
        sentences: number of sentences in each file; the smaller files have a quarter of them.
        readers: keys of `FILES`; all if empty.

    Returns:
        For each reader ``reader``, ``sentences``, ``sentences_per_second``, ``peak_rss_bytes`` over all processes,
        ``file_bytes``, and under ``smaller`` the same for a quarter of the sentences.

    Raises:
        InputError: there is no such reader.
        RunFailed: an import failed.
    """
    for reader in readers:
        if reader not in FILES:
            raise InputError(f"reader must be one of {', '.join(FILES)}, found {reader!r}")
    measured = []
    for reader in readers or FILES:
        smaller, larger = (_bench_reader(reader, count) for count in (sentences // SMALLER, sentences))
        measured.append({"reader": reader, **larger, "smaller": smaller})
    return measured


def describe(measured: Sequence[dict[str, Any]]) -> str:
    """Return the results as text."""
    lines = [f"{'reader':<18} {'sentences':>12} {'sentences/s':>12} {'peak memory':>12} {'at a quarter':>13}"]
    lines += [
        f"{one['reader']:<18} {one['sentences']:>12,} {one['sentences_per_second']:>12,.0f} "
        f"{one['peak_rss_bytes'] / 1e6:>9,.0f} MB {one['smaller']['peak_rss_bytes'] / 1e6:>10,.0f} MB"
        for one in measured
    ]
    return "\n".join(lines)


def _bench_reader(reader: str, sentences: int) -> dict[str, Any]:
    name, write = FILES[reader]
    with tempfile.TemporaryDirectory(prefix="flsim-bench-") as folder:
        path = Path(folder) / name
        say(f"{reader}: writing {sentences:,} sentences")
        write(path, examples(sentences))
        command = [sys.executable, "-m", "flsim", "data", "import", str(path), "--out", str(Path(folder) / "corpus")]
        say(f"{reader}: importing them")
        began = time.perf_counter()
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child, PeakMemory(child.pid) as peak:
            _, complaints = child.communicate()
        seconds = time.perf_counter() - began
        if child.returncode:
            silent = f"exit code {child.returncode}"  # as for a process that a signal ended
            raise RunFailed(f"{reader}: the import failed: {(complaints.strip().splitlines() or [silent])[-1]}")
        return {
            "sentences": sentences,
            "sentences_per_second": sentences / seconds,
            "peak_rss_bytes": peak.total,
            "file_bytes": path.stat().st_size,
        }


def examples(sentences: int) -> Iterator[tuple[str, str, str]]:
    """(split, client_id, tokens) of train users, consecutive for each user."""
    pool = _sentences()
    rng = stream(0, "benchmark examples")
    written = 0
    while written < sentences:
        client = f"{1 + written // PER_USER:08d}"
        for index in islice(rng.integers(len(pool), size=PER_USER).tolist(), sentences - written):
            written += 1
            yield "train", client, f"x{written} {pool[index]}" if written % RARE == 0 else pool[index]


def _sentences() -> list[str]:
    rng = stream(0, "benchmark sentences")
    words = np.array(_words(), object)
    law = np.cumsum(1 / np.arange(1, WORDS + 1))
    lengths = rng.integers(4, 18, DIFFERENT, endpoint=True)
    drawn = words[np.searchsorted(law, law[-1] * rng.random(lengths.sum()))]
    return [" ".join(sentence) + " ." for sentence in np.split(drawn, np.cumsum(lengths)[:-1])]


def _words() -> list[str]:
    """Return different words of letters only; frequent words are short."""
    return ["".join(chr(97 + int(digit)) for digit in np.base_repr(rank + 10, 10)) for rank in range(WORDS)]
