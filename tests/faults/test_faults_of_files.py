"""Tests of full disks and of changed or damaged files: flsim leaves no partial file, and accepts no wrong content."""

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty import (
    OPTIONS,
    assert_equal_runs,
    begin,
    digests,
    ended,
    events,
    fill,
    go_on,
    kill,
    resume,
    small_disk,
    wait_for,
)
from helpers import Experiment, start, wait_for_round

from flsim.results.rows import Evaluation, Row, log_evaluation, write_rows
from flsim.runs import config
from flsim.runs.folder import Run


@pytest.mark.nightly
def test_a_run_recovers_from_full_folders(experiment: Experiment, undisturbed: Path) -> None:
    """A full folder of checkpoints ends the run. With a full folder of rows, it trains to its end, without rows."""
    lame = experiment.folder / "lame"
    process, _ = begin(experiment, "lame", until_round=1)
    with full(lame / "checkpoints") as disk:
        go_on(experiment)
        code, said = ended(experiment, process)
        assert code == 1
        assert re.search(r"flsim: .*checkpoints/round-\d+.safetensors: .*No space left on device", said)
        assert [path.name for path in disk.iterdir()] == ["filler"]
    for rows in (lame / "rows").glob("*"):  # rows of an evaluation before the end, if any
        rows.unlink()
    with full(lame / "rows"):
        code, said = ended(experiment, start(experiment, "--out", "lame", *OPTIONS, "--resume"))
        assert code == 1
        assert re.search(r"could not be evaluated; `flsim run --resume` tries again: .*No space left on device", said)
        assert len(digests(lame)) == 30
    clients = events(lame).count("client process started")
    resume(experiment, "lame")
    assert_equal_runs(lame, undisturbed)
    assert events(lame).count("client process started") == clients  # because evaluations need no client


@pytest.mark.slow
def test_each_file_that_a_full_disk_refuses_is_named(experiment: Experiment, undisturbed: Path) -> None:
    """The error names each file that a run writes to a real full filesystem. Earlier content is unchanged."""
    with small_disk(experiment.folder / "small", megabytes=2) as disk:
        path = shutil.copytree(undisturbed, disk / "run")
        run, corpus = Run.open(path), experiment.folder / "corpus"
        settings, state = config.load(experiment.config, [f"data.corpus='{corpus}'"]), run.latest_state()
        before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        fill(disk)
        ended = Evaluation("round-000010.safetensors", "failed", 1, 1.0, 1.0, "x" * 10_000)
        row = Row(run.identity, 10, "perplexity", "", 1.0)
        writes: dict[str, Callable[[], object]] = {
            "checkpoints/round-000030.safetensors": lambda: run.save(state),
            "rounds.jsonl": lambda: run.log_round(round=31, text="x" * 10_000),
            "rows/round-000010.parquet": lambda: write_rows(path, 10, [row]),
            "run.json": lambda: run.mark("running"),
            "evaluations.jsonl": lambda: log_evaluation(path, ended),
            "../other": lambda: Run.create(settings, disk / "other"),
        }
        for name, write in writes.items():
            with pytest.raises(OSError, match="No space left on device") as raised:
                write()
            assert Path(raised.value.filename).is_relative_to((path / name).resolve()), name
        whole = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        assert set(whole) == set(before)
        assert all(content.startswith(before[file]) for file, content in whole.items())


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ["gone", "gone/planted", "corpus/train"])
def test_a_folder_that_was_moved_is_reported_as_missing(experiment: Experiment, folder: str) -> None:
    process, _ = begin(experiment, "gone", "system.retries=0", until_round=2)
    (experiment.folder / folder).rename(experiment.folder / "away")
    go_on(experiment)
    code, said = ended(experiment, process)
    assert code == 1
    assert f"{experiment.folder / folder}: n" in said
    assert said.count("no such folder") == 1
    assert "If it was moved or renamed" in said
    assert "damaged" not in said


@contextmanager
def full(folder: Path) -> Iterator[Path]:
    """Replace the folder temporarily with a link to a full filesystem; yield that filesystem."""
    away = folder.with_name("away")
    with small_disk(folder.parents[1] / f"small-{folder.name}", megabytes=1) as disk:
        fill(disk)
        folder.rename(away)
        folder.symlink_to(disk)
        yield disk
        folder.unlink()
        away.rename(folder)


@pytest.mark.nightly
def test_a_file_that_changes_under_the_clients_is_named(experiment: Experiment, undisturbed: Path) -> None:
    """The size is equal, so reading does not fail by itself. After the file is restored, the run resumes as usual."""
    file = "corpus/train/tokens.u16"
    process, _ = begin(experiment, "changed", "system.retries=0", until_round=5)
    path, kept = experiment.folder / file, experiment.folder / "kept"
    shutil.copy(path, kept)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    go_on(experiment)
    code, said = ended(experiment, process)
    assert code == 1
    assert f"{file}: " in said
    assert "changed since" in said
    refused = experiment.flsim("run", experiment.config, "--out", "changed", *OPTIONS, "--resume", check=False)
    assert refused.returncode == 2
    assert f"{file}: " in refused.stderr
    shutil.copy(kept, path)
    resume(experiment, "changed")
    assert_equal_runs(experiment.folder / "changed", undisturbed)


@pytest.mark.nightly
def test_a_shard_that_is_cut_off_under_the_clients_is_named(experiment: Experiment) -> None:
    """The clients' mapped memory ends with the file, so each client dies with SIGBUS."""
    process, _ = begin(experiment, "cut", "system.retries=1", until_round=5)
    tokens = experiment.folder / "corpus" / "train" / "tokens.u16"
    with tokens.open("r+b") as file:
        file.truncate(0)
    go_on(experiment)
    code, said = ended(experiment, process)
    assert code == 1
    assert f"{tokens}: missing, or its size differs" in said


@pytest.mark.slow
def test_damaged_rows_are_named_and_evaluated_again(
    experiment: Experiment, interrupted: Callable[[str], Path], undisturbed: Path
) -> None:
    broken = interrupted("broken")
    rows = broken / "rows" / "round-000010.parquet"
    rows.write_bytes(rows.read_bytes()[: rows.stat().st_size // 2])
    done = experiment.call("run", experiment.config, "--in-process", *OPTIONS, "--resume", "--out", "broken")
    assert f"{rows.name}: cannot be read; flsim ignores" in " ".join(done.stderr.split())
    assert_equal_runs(broken, undisturbed)


@pytest.mark.slow
def test_a_second_command_waits_while_another_trains_the_run(experiment: Experiment) -> None:
    options = ("--out", "one", "--in-process", *OPTIONS, "--set", "training.rounds=4000")
    process = start(experiment, *options)
    wait_for_round(experiment.folder / "one", 2)
    kill(process.pid, signal.SIGSTOP)  # it still has the run, and leaves the processor to the other
    other = start(experiment, *options, "--resume")
    wait_for(experiment.folder / "said", "waiting for the end of .*, which trains this run")
    kill(other.pid)
    other.wait()
    rounds = len(digests(experiment.folder / "one"))
    kill(process.pid, signal.SIGCONT)
    wait_for_round(experiment.folder / "one", rounds + 2)
    kill(process.pid)
    process.wait()
