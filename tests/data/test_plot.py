"""The figure of lengths: its areas are the histograms, it is whole or absent, and the command writes it."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from helpers import Experiment, MakeCorpus
from matplotlib.patches import StepPatch

from flsim import cli
from flsim.base.errors import InputError
from flsim.data.inspect import LENGTHS, inspect
from flsim.data.plot import FORMATS, draw_lengths, plot_lengths, short


@pytest.fixture
def summary(make_corpus: MakeCorpus) -> dict[str, Any]:
    """Train users of 1, 2, 4, ..., 512 records; test users of one; none held out."""
    train = [[[1, 2, 3][: 1 + record % 3] for record in range(2**power)] for power in range(10)]
    return inspect(make_corpus(train, test=[[[1]], [[2, 2]]]))


def test_areas_are_the_histograms(summary: dict[str, Any]) -> None:
    figure = draw_lengths(summary)
    figure.draw_without_rendering()
    assert [panel.get_xlabel() for panel in figure.axes] == [length.replace("_", " ") for length in LENGTHS]
    things = ("records", "users", "users")
    assert [panel.get_ylabel() for panel in figure.axes] == [f"share of {name} (%)" for name in things]
    assert [panel.get_xscale() for panel in figure.axes] == ["linear", "log", "log"]
    for panel, length in zip(figure.axes, LENGTHS, strict=True):
        patches = [patch for patch in panel.patches if isinstance(patch, StepPatch)]
        for name, patch in zip(("train", "test"), patches, strict=True):
            histogram = summary["splits"][name]["histograms"][length]
            shares, edges, _ = patch.get_data()
            np.testing.assert_allclose(np.asarray(shares) * sum(histogram["counts"]) / 100, histogram["counts"])
            half = 0.5 * (length == "words_per_record")  # a bin of one value is drawn around it
            np.testing.assert_allclose(edges, np.array(histogram["edges"]) - half)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train, 10 users", "test, 2 users"]


def test_splits_differ_without_colour_and_the_legend_covers_no_data(make_corpus: MakeCorpus) -> None:
    figure = draw_lengths(inspect(make_corpus([[[1]], [[1, 2]]], test=[[[1]]], heldout=[[[2]]])))
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert not any(panel.get_tightbbox().overlaps(legend) for panel in figure.axes)  # type: ignore[union-attr]
    looks = {(patch.get_fill(), str(patch.get_linestyle())) for patch in figure.axes[0].patches}
    assert len(looks) == 3


def test_users_without_records_have_a_place(make_corpus: MakeCorpus) -> None:
    """A logarithmic axis has no 0."""
    found = inspect(make_corpus([[], [[1]], [[1]] * 500]))
    figure = draw_lengths(found)
    figure.draw_without_rendering()
    assert found["splits"]["train"]["histograms"]["records_per_user"]["edges"][0] == 0
    assert figure.axes[1].get_xscale() == "symlog"


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_the_same_corpus_gives_the_same_file(
    summary: dict[str, Any], tmp_path: Path, suffix: str, start: bytes
) -> None:
    before = dict(mpl.rcParams)
    path = tmp_path / f"lengths{suffix}"
    plot_lengths(summary, path)
    first = path.read_bytes()
    plot_lengths(summary, path)
    assert first.startswith(start)
    assert path.read_bytes() == first
    assert [left.name for left in tmp_path.glob("*lengths*")] == [path.name]
    assert dict(mpl.rcParams) == before


@pytest.fixture
def command(
    experiment: Experiment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs `flsim data inspect` in the experiment's folder: exit code, standard output, standard error."""
    monkeypatch.chdir(experiment.folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["flsim", "data", "inspect", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_command_writes_a_figure_beside_its_text(
    command: Callable[..., tuple[int, str, str]], experiment: Experiment
) -> None:
    plain = command("corpus")
    assert (plain[0], plain[2]) == (0, "")
    assert command("corpus", "--plot", "a.png") == plain
    as_json = command("corpus", "--json")
    assert command("corpus", "--json", "--plot", "b.png") == as_json
    assert json.loads(as_json[1])["users"] == 24
    first = (experiment.folder / "a.png").read_bytes()
    assert first == (experiment.folder / "b.png").read_bytes()
    width, height = struct.unpack(">II", first[16:24])  # of the IHDR chunk
    assert (width, height) == (1650, 510)
    assert 10_000 < len(first) < 200_000


def test_what_cannot_be_drawn_or_read_is_refused(
    command: Callable[..., tuple[int, str, str]], experiment: Experiment
) -> None:
    """With exit code 2, one line, and nothing written."""
    tokens = experiment.folder / "corpus" / "train" / "tokens.u16"
    before = sorted(path.name for path in experiment.folder.iterdir())

    def refused(*arguments: str) -> str:
        code, output, error = command(*arguments)
        assert (code, output) == (2, "")
        assert len(error.splitlines()) == 1
        assert sorted(path.name for path in experiment.folder.iterdir()) == before
        return error

    assert "plot.gif: plots are written as .png, .svg or .pdf" in refused("corpus", "--plot", "plot.gif")
    assert "no such folder as nowhere" in refused("corpus", "--plot", "nowhere/plot.png")
    assert "not a corpus" in refused(".", "--plot", "plot.png")
    whole = tokens.read_bytes()
    tokens.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "tokens.u16: changed since the import" in refused("corpus", "--plot", "plot.png")
    tokens.write_bytes(whole[:-2])
    assert "tokens.u16: missing or of another size" in refused("corpus")
    tokens.unlink()
    assert "tokens.u16: missing" in refused("corpus")


def test_kinds_of_file(summary: dict[str, Any], tmp_path: Path) -> None:
    assert list(FORMATS) == [".png", ".svg", ".pdf"]
    for wrong in (tmp_path / "plot", tmp_path / "plot.png.gz", tmp_path / "none" / "plot.png"):
        with pytest.raises(InputError, match=r"name one of these|no such folder"):
            plot_lengths(summary, wrong)
        assert not wrong.exists()


def test_short_numbers() -> None:
    numbers = {0: "0", 9_999: "9,999", 10_000: "10k", 999_499: "999k", 999_500: "1M", 1_049_321: "1.05M", 3e8: "300M"}
    assert {number: short(number) for number in numbers} == numbers
