"""`flsim bench characters` on little: what it prints, and that it refuses to compare different work."""

import json
from dataclasses import replace

import numpy as np
import pytest

from flsim import cli
from flsim.base.errors import RunFailed
from flsim.bench import characters
from flsim.bench.characters import LAYOUT, NETWORKS, CharactersBenchHParams, bench_characters, describe, lines_of
from flsim.models.architectures import weights_of
from flsim.training.central import CentralHParams

TINY = CharactersBenchHParams(("lstm, 2 layers", "gru, 2 layers"), batch_size=2, steps=1, turns=2, length=8)


def test_figures() -> None:
    measured = bench_characters(TINY)
    for name in TINY.networks:
        rates = measured["characters_per_second"][name]
        assert measured["ratio"][name] == pytest.approx(rates["ours"] / rates["plain"])
        assert measured["distance"][name] < 1e-3
    read = np.diff(lines_of(4, 8).record_offsets)
    assert 0 <= measured["padding"] < 1
    assert read.sum() > 0
    assert all(len(line) <= 90 for line in describe(measured).splitlines())


def test_the_networks_are_of_the_published_size() -> None:
    """Table 1 of Carlini et al. (2018): 620,000 parameters, give or take 5,000."""
    for network in NETWORKS.values():
        assert weights_of(LAYOUT.vocabulary_size, network) == pytest.approx(620_000, abs=5_000)


def test_lines_are_as_long_as_asked_for() -> None:
    """The mean of 20,000 lengths of deviation 60 lies within 5 of its standard deviations, 2.1, of 120."""
    lengths = np.diff(lines_of(20_000, 120).record_offsets)
    assert abs(lengths.mean() - 120) < 5 * 60 / np.sqrt(20_000)
    assert lengths.std() == pytest.approx(60, rel=0.05)


def test_other_work_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop trains at another learning rate than ours."""
    rate, asked = CentralHParams.rate, list[int]()

    def drifting(self: CentralHParams, step: int, steps: int) -> float:
        asked.append(step)
        return rate(self, step, steps) * (1 if len(asked) == 1 else 2)

    monkeypatch.setattr(CentralHParams, "rate", drifting)
    with pytest.raises(RunFailed, match="the plain loop came to another model"):
        bench_characters(replace(TINY, networks=TINY.networks[:1]))


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(characters, "CharactersBenchHParams", lambda **chosen: replace(TINY, **chosen))
    monkeypatch.setattr("sys.argv", ["flsim", "bench", "characters", "--json", "--batch", "3"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)["batch_size"] == 3
