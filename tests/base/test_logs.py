"""log.jsonl: a line per event that says what it is about, whatever the disk, in all folders that asked for it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from faulty import fill, small_disk

from flsim.base.logs import FILE, log, logging_to
from flsim.base.progress import say


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]


def test_a_line_says_when_how_bad_what_where_and_about_what(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    began = datetime.now(UTC)
    with logging_to(run):
        log.warning("shard asked again", extra={"round": 3, "shard": 1, "reason": "MemoryError: ü\n2"})
        log.info("%d of %s", 2, "these", extra={"file": tmp_path, "_of_ours": 1})
        log.debug("too much")
    first, second = lines(run)
    assert list(first) == ["time", "level", "event", "run", "round", "shard", "reason"]
    when = datetime.fromisoformat(first.pop("time"))
    assert when.utcoffset() == timedelta()
    assert began - timedelta(milliseconds=1) <= when <= datetime.now(UTC)
    assert first == {
        "level": "warning",
        "event": "shard asked again",
        "run": "a run",
        "round": 3,
        "shard": 1,
        "reason": "MemoryError: ü\n2",
    }
    assert (second["event"], second["file"]) == ("2 of these", str(tmp_path))
    assert list(second) == ["time", "level", "event", "run", "file"]


def test_what_is_said_is_logged_with_what_it_is_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path):
        say("shard 2 hangs", round=4, shard=2)
    assert capsys.readouterr().err == "shard 2 hangs\n"
    (line,) = lines(tmp_path)
    assert (line["level"], line["event"], line["round"], line["shard"]) == ("info", "shard 2 hangs", 4, 2)


def test_folders_that_overlap_get_all_of_it_each_under_its_name_and_then_nothing(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    outer.mkdir()
    inner.mkdir()
    level, handlers = log.level, list(log.handlers)
    log.error("nobody listens")
    with logging_to(outer):
        log.info("one")
        with logging_to(inner):
            log.info("two")
        log.info("three")
    log.error("nobody listens any more")
    assert (log.level, log.handlers) == (level, handlers)
    assert [(line["run"], line["event"]) for line in lines(outer)] == [
        ("outer", event) for event in ("one", "two", "three")
    ]
    assert [(line["run"], line["event"]) for line in lines(inner)] == [("inner", "two")]


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        with logging_to(disk):
            log.info("before")
            filler = fill(disk)
            for number in range(100):
                log.info("x" * 1000, extra={"number": number})
            filler.unlink()
            log.info("after")
            fill(disk)
            for number in range(100):
                log.info("x" * 1000, extra={"number": number})
        text = (disk / FILE).read_text()
    events = [json.loads(line)["event"] for line in text.splitlines() if line.endswith("}")]
    assert events[0] == "before"
    assert "after" in events
    assert capfd.readouterr() == ("", "")
