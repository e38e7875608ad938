"""The plot: what its lines say, what its legend covers, and that it is whole or absent."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from flsim.errors import InputError
from flsim.results.plots import draw_rounds, plot_rounds
from flsim.results.store import RunResults, read_run

MakeRun = Callable[..., Path]


def measured(level: float) -> dict[str, list[float] | float]:
    """`level` canaries are memorized by RS, half of them by BS."""
    return {
        "rs": [float(index < level) for index in range(9)],
        "bs": [float(2 * index < level - 1) for index in range(9)],
        "exposure": [level + index for index in range(9)],
    }


@pytest.fixture
def runs(make_run: MakeRun) -> list[RunResults]:
    folders = [
        make_run({10: measured(2), 20: measured(6)}, name="iid"),
        make_run({10: measured(0), 20: measured(2)}, name="non-iid", setting="Non-IID, FedAvg, b_u = 16"),
        make_run({10: measured(4)}, name="wild", setting="$1$, lr = 9", status="diverged"),
        make_run(name="new", setting="Later", status="running"),
    ]
    return [read_run(folder) for folder in folders]


def test_lines_are_the_measurements(runs: list[RunResults]) -> None:
    rs, bs, exposure = draw_rounds(runs).axes
    expected = {rs: [2, 6], bs: [1, 3], exposure: [6, 10]}
    for panel, values in expected.items():
        x, y = np.asarray(panel.get_lines()[0].get_data())
        assert (x.tolist(), y.tolist()) == ([10, 20], values)
        assert [len(np.asarray(line.get_xdata())) for line in panel.get_lines()] == [2, 2, 1, 0]
        assert panel.get_xlabel() == "completed rounds (central: steps)"
    assert rs.get_ylabel() == bs.get_ylabel() == "canaries memorized (of 9)"
    assert rs.get_ylim() == bs.get_ylim()
    assert "bits" in exposure.get_ylabel()


def test_the_band_is_the_interval_of_the_table(runs: list[RunResults]) -> None:
    """Exposures are 2 to 10 at round 10: mean 6, variance 7.5, and t at 97.5% with 8 degrees of freedom is 2.306."""
    band = draw_rounds(runs).axes[2].collections[0].get_paths()[0].vertices
    at_10 = np.asarray(band)[np.asarray(band)[:, 0] == 10, 1]
    half = 2.306 * np.sqrt(7.5 / 9)
    assert (at_10.min(), at_10.max()) == pytest.approx((6 - half, 6 + half), abs=1e-3)


def test_labels_say_what_is_not_a_finished_run(runs: list[RunResults], make_run: MakeRun) -> None:
    again = read_run(make_run({10: measured(1)}, name="seed-1"))
    legend = draw_rounds([*runs, again]).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [
        "IID, FedAvg, b_u = 16 [iid]",
        "Non-IID, FedAvg, b_u = 16",
        r"\$1\$, lr = 9 (diverged, round 10)",
        "Later (running, round 0)",
        "IID, FedAvg, b_u = 16 [seed-1]",
    ]


def test_the_legend_covers_no_data_and_lines_differ_without_colour(make_run: MakeRun) -> None:
    many = [read_run(make_run({10: measured(1)}, name=f"run-{index}")) for index in range(12)]
    figure = draw_rounds(many)
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert not any(panel.get_tightbbox().overlaps(legend) for panel in figure.axes)  # type: ignore[union-attr]
    lines = figure.axes[0].get_lines()
    assert len({(str(line.get_marker()), str(line.get_linestyle())) for line in lines}) == 12


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".SVG", b"<?xml")])
def test_the_same_results_give_the_same_file(runs: list[RunResults], tmp_path: Path, suffix: str, start: bytes) -> None:
    before = dict(mpl.rcParams)
    path = tmp_path / f"memorization{suffix}"
    plot_rounds(runs, path)
    first = path.read_bytes()
    plot_rounds(runs, path)
    assert first.startswith(start)
    assert path.read_bytes() == first
    assert [left.name for left in tmp_path.glob("*memorization*")] == [path.name]
    assert dict(mpl.rcParams) == before


def test_what_cannot_be_drawn_is_refused(runs: list[RunResults], tmp_path: Path) -> None:
    for wrong, path, message in (
        (runs, tmp_path / "plot.pdf", ".png or .svg"),
        (runs, tmp_path / "none" / "plot.png", "no such folder"),
        (runs[3:], tmp_path / "plot.png", "new: not evaluated yet"),
        ([], tmp_path / "plot.png", "no runs"),
    ):
        with pytest.raises(InputError, match=message):
            plot_rounds(wrong, path)
        assert not path.exists()
