"""The figures of secrets against their exposure: points, marks, lines, and what is missing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import Experiment
from matplotlib.lines import Line2D

from experiments.secret_sharer_figures import (
    RANKS,
    SEARCH,
    draw_ranks,
    draw_search,
    main,
    plot_search,
    secret_pairs,
)
from flsim.base.errors import InputError
from flsim.results.rows import Row, write_rows
from flsim.results.store import RunResults, read_run
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint

MakeRun = Callable[..., Path]
SPACE = 1024
GRID = ((0.1, 1.0),) * 3
# By canary: rank, estimated exposure, p of the fit, nodes up to the canary. None: more nodes than there may be.
MEASURED = ((1, 11.0, 0.5, 4), (8, 6.0, 0.2, 20), (None, 1.5, 0.001, None))


def rows_of(name: str) -> list[Row]:
    rows = []
    for index, (rank, bits, p, nodes) in enumerate(MEASURED):
        values = {"extrapolated_exposure": bits, "extrapolation_p": p, "path_nodes": 2.0 * (nodes or 50)}
        values |= {"space_exposure": np.log2(SPACE / rank) if rank else 1.2}
        if rank and nodes:
            values |= {"space_rank": rank, "space_nodes": nodes, "path": float(rank == 1)}
        rows += [Row(name, 10, metric, f"c{index:02d}", float(value)) for metric, value in values.items()]
    return rows


@pytest.fixture
def run(make_run: MakeRun) -> RunResults:
    folder = make_run(name="iid", grid=GRID, round=10)
    write_rows(folder, 10, rows_of("iid"))
    return read_run(folder)


def points(lines: list[Line2D]) -> list[tuple[bool, list[list[float]]]]:
    """Return of each line of round markers that has points whether they are filled, and the points."""
    return [
        (line.get_markerfacecolor() != "none", np.asarray(line.get_data()).T.tolist())
        for line in lines
        if line.get_marker() == "o" and len(np.asarray(line.get_xdata()))
    ]


def note_of(figure: object) -> str:
    return " ".join(figure.get_supxlabel().split())  # type: ignore[attr-defined]


def test_a_search_is_filled_where_it_finds_the_secret(run: RunResults) -> None:
    figure = draw_search(secret_pairs([run], SEARCH, "search"))
    (panel,) = figure.axes
    assert points(panel.get_lines()) == [(False, [[6, 20]]), (True, [[11, 4]])]
    (crosses,) = [line for line in panel.get_lines() if line.get_marker() == "x"]
    assert np.asarray(crosses.get_data()).tolist() == [[11], [8]]
    levels = [np.asarray(line.get_data()).tolist() for line in panel.get_lines() if line.get_marker() == "None"]
    assert levels == [[[10, 10], [0, 1]], [[0, 1], [SPACE, SPACE]]]  # log2 |R|, and brute force
    assert "1 of 3 points are not drawn" in note_of(figure)


def test_ranks_are_beside_the_line_of_estimates(run: RunResults) -> None:
    """16 of 1,024 phrases are expected at 6 bits, where the rank is 8, and fewer than one at 11 bits."""
    figure = draw_ranks(secret_pairs([run], RANKS, "ranks"))
    (panel,) = figure.axes
    assert points(panel.get_lines()) == [(True, [[11, 1], [6, 8]])]
    lines = [line for line in panel.get_lines() if len(np.asarray(line.get_xdata())) == 200]
    bits, expected = np.asarray(lines[0].get_data())
    assert expected == pytest.approx(SPACE * 2**-bits)
    note = note_of(figure)
    assert "Of 2 points 2 are within a factor of ten" in note
    assert "of 1 secrets with an estimated exposure above log2 |R|, 1 have rank 1" in note
    assert "1 more points are not drawn" in note


def test_missing_measures_are_named_with_what_to_do(make_run: MakeRun, run: RunResults, tmp_path: Path) -> None:
    plain = read_run(make_run({10: {"exposure": [1.0] * 9}}, name="plain"))
    sampled = make_run(name="sampled", grid=GRID, round=10)
    write_rows(sampled, 10, [row for row in rows_of("sampled") if row.metric not in {"space_rank", "space_nodes"}])
    for runs, message in (
        ([plain], "plain: no evaluation has the measure space; train with .*flsim evaluate .* --also extrapolation"),
        ([read_run(sampled)], "no evaluation has an exact rank: .* --nodes 1000000"),
        ([], "no runs: no evaluation has the measure space"),
    ):
        with pytest.raises(InputError, match=message):
            plot_search(runs, tmp_path / "search.png")
    assert not list(tmp_path.glob("*.png"))


def test_a_checkpoint_has_what_the_figures_need(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were counted are at most |R|, and a search reads no fewer nodes than lie before a secret it finds."""
    monkeypatch.chdir(experiment.folder)
    run = Run.create(load(experiment.config, ["training.rounds=2"]), experiment.folder / "run")
    state = run.latest_state()
    loud = {name: value * 4 for name, value in state.params.items()}
    also = tuple(measure.name for measure in SEARCH)
    evaluate_checkpoint(run.path, run.save(replace(state, round=2, params=loud)), also=also, nodes=10**6)
    pairs = secret_pairs([read_run(run.path)], SEARCH, "search")
    assert len(pairs) == len(read_run(run.path).planted)
    assert pairs["space_rank"].between(1, pairs["phrases"]).all()
    found = pairs[pairs["path"] == 1]
    assert (found["space_rank"] == 1).all()
    assert (found["path_nodes"] >= found["space_nodes"]).all()
    for figure in ("search", "ranks"):
        main([figure, "run", "--out", f"{figure}.svg"])
        assert (experiment.folder / f"{figure}.svg").read_bytes().startswith(b"<?xml")
