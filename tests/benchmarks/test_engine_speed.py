"""The engine's benchmark at a small size: users as it says they are, and a figure for each row."""

import json
import sys

import numpy as np
import pytest

from benchmarks import engine, libraries
from flsim.data.vocabulary import Layout
from flsim.models.architectures import ModelHParams


def test_drawn_users_are_as_said() -> None:
    """2,000 words each, in records of 8 on average and at most 20; a spread of 1 has a median of 2,000."""
    users = engine.DrawnUsers(20)
    sizes = [users[user].words for user in range(len(users))]
    assert all(2_000 <= size < 2_000 + engine.LAYOUT.record_words for size in sizes)
    lengths = np.concatenate([np.diff(users[user].offsets) for user in range(len(users))])
    assert (lengths.min(), lengths.max()) == (1, engine.LAYOUT.record_words)
    assert lengths.mean() == pytest.approx(8, abs=0.5)
    assert engine.LAYOUT.first_word <= min(users[0].tokens)
    assert max(users[0].tokens) <= engine.LAYOUT.last_word
    wide = engine.DrawnUsers(101, spread=1.0)
    # The median's logarithm has a standard error of 1.25 / sqrt(101).
    assert abs(np.log(np.median([wide[user].words for user in range(101)]) / 2_000)) < 4 * 1.25 / 101**0.5


def test_libraries_are_compared_on_the_same_users() -> None:
    assert libraries.ratio(4, ModelHParams(4, 6), users=1, words=50, turns=1) > 0


def test_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own command line."""
    layout = Layout(60)
    options = ["--device=cpu", "--precision=float32", "--cohort=3", "--profile", "--json", "--at-once", "1", "2"]
    for thing, name, value in (
        (engine, "USER_WORDS", 20),
        (engine, "LAYOUT", layout),
        (engine.DrawnUsers, "layout", layout),
        (engine.Held, "layout", layout),
        (sys, "argv", ["engine", *options]),
    ):
        monkeypatch.setattr(thing, name, value)
    engine.main()
    measured = json.loads(capsys.readouterr().out)
    assert {row["precision"] for row in measured["rows"]} == {"float32"}
    assert [row["micro_cohort"] for row in measured["rows"]] == [1, 2]
    for row in measured["rows"]:
        assert all(row[name] > 0 for name in ("users_per_second", "training_alone", "packing_alone", "said_gigabytes"))
        assert "aten::bmm" in row["profile"]
    assert len(engine.describe(measured).splitlines()) > 4
