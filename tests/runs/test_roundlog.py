"""The log of rounds: whole after every fault, or it says what it has lost."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.runs import roundlog
from flsim.runs.roundlog import FILE, append, cut, lost, read, settle

GARBAGE = (b"", b"{", b"\xff\xfe\x00", b"[]", b'{"round": "7"}', b'{"round": 0}', b'{"round": true}', b'{"loss": 1}')


def write(folder: Path, lines: list[bytes]) -> None:
    (folder / FILE).write_bytes(b"".join(line + b"\n" for line in lines))


def numbers(folder: Path) -> list[int]:
    """The rounds of all lines, as they are in the file."""
    return [json.loads(line)["round"] for line in (folder / FILE).read_text().splitlines()]


@given(
    lines=st.lists(st.integers(1, 30) | st.sampled_from(GARBAGE), max_size=60),
    reached=st.integers(0, 25),
    twice=st.booleans(),
)
def test_every_round_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int | bytes], reached: int, twice: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, [line if isinstance(line, bytes) else json.dumps({"round": line}).encode() for line in lines])
    missing = settle(folder, reached, by_round=True)
    if twice:
        assert settle(folder, reached, by_round=True) == []
    known = {line for line in lines if isinstance(line, int) and line <= reached}
    assert numbers(folder) == list(range(1, reached + 1))
    assert [line["round"] for line in read(folder)] == sorted(known)
    assert [round_ for part in lost(folder) for round_ in part] == sorted({*range(1, reached + 1)} - known)
    assert lost(folder) == missing


def test_of_two_lines_about_a_round_the_later_one_stays(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        append(tmp_path, round=1, loss=loss)
    settle(tmp_path, 1, by_round=True)
    assert read(tmp_path) == [{"round": 1, "loss": 2.0}]


def test_a_whole_log_is_left_as_it_is(tmp_path: Path) -> None:
    for round_ in (1, 2):
        append(tmp_path, round=round_)
    before = (tmp_path / FILE).stat()
    assert settle(tmp_path, 2, by_round=True) == []
    assert (tmp_path / FILE).stat().st_ino == before.st_ino


def test_lines_of_central_training_follow_each_other(tmp_path: Path) -> None:
    """A line counts steps since the one before; older logs say not since when, and are taken for whole."""
    for since, step in ((0, 10), (10, 15), (20, 30)):
        append(tmp_path, round=step, since=since)
    assert settle(tmp_path, 40, by_round=False) == [range(16, 21), range(31, 41)]
    assert numbers(tmp_path) == [10, 15, 20, 30, 40]
    assert lost(tmp_path) == [range(16, 21), range(31, 41)]
    assert settle(tmp_path, 40, by_round=False) == []
    write(tmp_path, [b'{"round": 10}', b'{"round": 30}'])
    assert settle(tmp_path, 30, by_round=False) == []


def test_what_comes_again_is_dropped(tmp_path: Path) -> None:
    for round_ in range(1, 6):
        append(tmp_path, round=round_)
    cut(tmp_path, 3)
    assert numbers(tmp_path) == [1, 2, 3]


def test_training_losses_are_means_between_the_given_rounds() -> None:
    """Weighted by steps: (3 * 2 + 1 * 6) / 4 = 3 up to step 4. Federated lines count one round each."""
    steps = ((0, 3, 2.0), (3, 4, 6.0), (4, 6, None), (6, 8, 1.0), (8, 9, 5.0))
    central: list[roundlog.Line] = [{"since": since, "round": step, "loss": loss} for since, step, loss in steps]
    assert roundlog.mean_losses(central, [8, 4]) == {4: 3.0, 8: 1.0}
    assert roundlog.mean_losses(central, [6, 9]) == {6: 3.0, 9: (2 * 1.0 + 5.0) / 3}
    federated: list[roundlog.Line] = [{"round": round_, "loss": float(round_)} for round_ in (1, 2, 3, 4)]
    assert roundlog.mean_losses(federated, [2, 4]) == {2: 1.5, 4: 3.5}
