"""Plots: lines, legends, notes and error messages, and files that are complete or absent."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from helpers import Experiment, Flsim
from matplotlib.lines import Line2D

from experiments.secret_sharer_figures import RANKS, SEARCH, draw_ranks, draw_search, main, plot_search, secret_pairs
from flsim.base.errors import InputError
from flsim.base.statistics import t_interval
from flsim.results.rows import Row, RunResults, read_run, round_in_short, write_rows
from flsim.runs.config import load
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.show.plots import draw_against_utility, draw_losses, draw_rounds, plot

MakeRun = Callable[..., Path]


def measured(level: float) -> dict[str, list[float] | float]:
    """Return measures: RS finds `level` canaries, BS about half of them; perplexity falls as `level` rises."""
    return {
        "rs": [float(index < level) for index in range(9)],
        "bs": [float(2 * index < level - 1) for index in range(9)],
        "exposure": [level + index for index in range(9)],
        "perplexity": 100 - level,
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
    rs, bs, exposure, perplexity = draw_rounds(runs).axes
    expected = {rs: [2, 6], bs: [1, 3], exposure: [6, 10], perplexity: [98, 94]}
    for panel, values in expected.items():
        x, y = np.asarray(panel.get_lines()[0].get_data())
        assert (x.tolist(), y.tolist()) == ([10, 20], values)
        assert [len(np.asarray(line.get_xdata())) for line in panel.get_lines()] == [2, 2, 1, 0]
    assert perplexity.get_xlabel() == "completed rounds (central: steps)"
    assert [panel.get_ylabel() for panel in (rs, bs)] == ["canaries memorized (of 9)", "canaries extracted (of 9)"]
    assert rs.get_ylim() == bs.get_ylim()


def test_runs_that_know_their_epochs_are_drawn_over_epochs(make_run: MakeRun) -> None:
    folders = [
        make_run({10: measured(2), 20: measured(6)}, name="fedavg", rounds_per_epoch=10),
        make_run({372: measured(1), 744: measured(3)}, name="sgd", rounds_per_epoch=372),
        make_run(name="new", status="running"),  # has no line, so it needs no epochs
    ]
    known = [read_run(folder) for folder in folders]
    for panel in draw_rounds(known).axes:
        assert [np.asarray(line.get_xdata()).tolist() for line in panel.get_lines()] == [[1, 2], [1, 2], []]
    assert "records read" in draw_rounds(known).axes[2].get_xlabel()
    older = [*known[::2], read_run(make_run({5: measured(1)}, name="old"))]
    lines = draw_rounds(older).axes[0].get_lines()
    assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [[10, 20], [], [5]]


@pytest.fixture
def seeds(make_run: MakeRun) -> list[RunResults]:
    """Return three seeds, of which the last has one more round, one that diverged, and one seed of another setting."""
    common = {"series": "a", "rounds_per_epoch": 10}
    found = [
        make_run({10: measured(2 + seed), 20: measured(6)} | extra, name=f"a-{seed}", seed=seed, **common)
        for seed, extra in ((0, {}), (1, {}), (2, {30: measured(8)}))
    ]
    found.append(make_run({10: measured(9)}, name="wild", seed=3, status="diverged", **common))
    found.append(make_run({10: measured(1)}, name="b-0", setting="B", seed=0, series="b", rounds_per_epoch=10))
    return [read_run(folder) for folder in found]


def test_over_seeds_a_line_is_a_mean_with_the_seeds_interval(seeds: list[RunResults]) -> None:
    """RS counts 2, 3 and 4 after one epoch have mean 3 and deviation 1. t at 97.5%, 2 degrees of freedom, is 4.303."""
    figure = draw_rounds(seeds, over_seeds=True)
    rs, bs, exposure, perplexity = figure.axes
    expected = {rs: [3, 6], bs: [(1 + 1 + 2) / 3, 3], exposure: [7, 10], perplexity: [97, 94]}
    for panel, values in expected.items():
        first, second = panel.get_lines()
        assert np.asarray(first.get_xdata()).tolist() == [1, 2]  # only one seed has the third round
        assert np.asarray(first.get_ydata()) == pytest.approx(values)
        assert np.asarray(second.get_xdata()).tolist() == [1]
    for panel, middle in ((rs, 3), (exposure, 7), (perplexity, 97)):
        band = np.asarray(panel.collections[0].get_paths()[0].vertices)
        at_1 = band[band[:, 0] == 1, 1]
        half = 4.303 / np.sqrt(3)
        assert (at_1.min(), at_1.max()) == pytest.approx((middle - half, middle + half), abs=1e-3)
    legend = figure.legends[0]
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["IID, FedAvg, b_u = 16 (3 seeds, 1 excluded)", "B (1 seed)"]
    assert "over seeds" in legend.get_title().get_text()


def test_an_evaluation_is_summarized_in_one_line(make_run: MakeRun) -> None:
    folder = make_run({10: measured(2), 20: measured(6)})
    assert round_in_short(folder, 10) == "RS 2, BS 1, 6.0 bits of 9 canaries"
    assert round_in_short(folder, 30) is None


def test_an_evaluation_just_before_the_last_is_not_drawn(make_run: MakeRun) -> None:
    for last, drawn in ((310, [100, 200, 310]), (350, [100, 200, 300, 350])):
        rounds = {round_: measured(3) for round_ in (100, 200, 300, last)}
        line = draw_rounds([read_run(make_run(rounds, name=f"until-{last}"))]).axes[3].get_lines()[0]
        assert np.asarray(line.get_xdata()).tolist() == drawn


def test_the_ceiling_of_exposure_is_drawn_if_curves_come_near_it(make_run: MakeRun) -> None:
    for level, ceilings in ((1, []), (3, [np.log2(10_000 + 1)])):  # mean exposures of 5 and 7 bits
        by_round = {10: measured(level) | {"references": 10_000}, 20: measured(level) | {"references": 10_000}}
        panel = draw_rounds([read_run(make_run(by_round, name=f"level-{level}"))]).axes[2]
        assert [np.asarray(line.get_ydata())[0] for line in panel.get_lines()[:-1]] == ceilings
        assert all(ceiling < panel.get_ylim()[1] for ceiling in ceilings)


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".SVG", b"<?xml")])
def test_the_same_results_give_the_same_file(runs: list[RunResults], tmp_path: Path, suffix: str, start: bytes) -> None:
    before = dict(mpl.rcParams)
    path = tmp_path / f"memorization{suffix}"
    plot(runs, path)
    first = path.read_bytes()
    plot(runs, path)
    assert first.startswith(start)
    assert path.read_bytes() == first
    assert [left.name for left in tmp_path.glob("*memorization*")] == [path.name]
    assert dict(mpl.rcParams) == before


def test_plots_without_results_or_with_bad_paths_are_refused(runs: list[RunResults], tmp_path: Path) -> None:
    for wrong, path, message in (
        (runs, tmp_path / "plot.jpg", ".png, .svg and .pdf"),
        (runs, tmp_path / "none" / "plot.png", "does not exist; create it first"),
        (runs[3:], tmp_path / "plot.png", "the run has no evaluation yet"),
        ([], tmp_path / "plot.png", "no runs"),
    ):
        with pytest.raises(InputError, match=message):
            plot(wrong, path)
        assert not path.exists()


Metrics = dict[str, list[float] | float]


def lossy(test_loss: float, bits: float, estimated: float | None = None) -> Metrics:
    metrics: Metrics = {"perplexity": math.exp(test_loss), "exposure": [bits] * 9}
    return metrics | ({} if estimated is None else {"extrapolated_exposure": [estimated] * 9})


@pytest.fixture
def lossy_seeds(make_run: MakeRun) -> list[RunResults]:
    """Return two seeds whose test loss is lowest after two epochs, and whose exposure is highest after three."""
    found = []
    for seed in (0, 2):
        rounds = {10: lossy(3, 1, 1 + seed), 20: lossy(1, 4, 5 + seed), 30: lossy(2, 6, 7 + seed)}
        found.append(read_run(make_run(rounds, name=f"seed-{seed}", seed=seed, series="a", rounds_per_epoch=10)))
    return found


def test_losses_are_on_one_axis_and_estimated_exposure_on_the_other(lossy_seeds: list[RunResults]) -> None:
    losses = {run: {10: 3.5 + index, 20: 2.5 + index, 30: 0.5 + index} for index, run in enumerate(lossy_seeds)}
    figure = draw_losses(lossy_seeds, losses, over_seeds=True)
    loss, exposure = figure.axes
    training, test, minimum = loss.get_lines()
    assert np.asarray(training.get_data()).tolist() == [[1, 2, 3], [4, 3, 1]]
    assert np.asarray(test.get_data()) == pytest.approx(np.array([[1, 2, 3], [3, 1, 2]]))
    assert np.asarray(minimum.get_xdata()).tolist() == [2, 2]
    [bits] = exposure.get_lines()
    assert np.asarray(bits.get_data()).tolist() == [[1, 2, 3], [2, 6, 8]]
    assert (loss.get_ylabel(), exposure.get_ylabel()) == ("loss (nats per word)", "estimated exposure (bits)")
    assert loss.get_title() == "IID, FedAvg, b_u = 16 (2 seeds)"
    (text,) = loss.texts
    assert text.get_text() == "lowest test loss: epoch 2\nhighest exposure: epoch 3"
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["training loss", "test loss"]


def test_the_command_reads_losses_from_the_log(flsim: Flsim, lossy_seeds: list[RunResults], tmp_path: Path) -> None:
    message = "seed-0, seed-2: rounds.jsonl has no training loss"
    code, _, printed = flsim("plot", "seed-0", "seed-2", "--kind", "loss", "--out", "loss.svg")
    assert (code, message in printed) == (2, True), printed
    for run in lossy_seeds:
        lines = [{"round": round_, "since": round_ - 10, "loss": 1.0} for round_ in (10, 20, 30)]
        (tmp_path / run.name / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert flsim("plot", "seed-0", "seed-2", "--kind", "loss", "--out", "loss.svg") == (0, "", "")
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")


def test_plots_of_losses_without_losses_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    new = read_run(make_run(name="new", status="running"))
    decided = read_run(make_run({10: {"rs": [0.0] * 9, "perplexity": 3.0}}, name="decided"))
    for run, losses, message in (
        (new, {}, "new: the run has no evaluation yet"),
        (decided, {}, "no training loss"),
        (decided, {10: 1.0}, "no evaluation has exposure; train without evaluation.decide"),
    ):
        with pytest.raises(InputError, match=message):
            plot([run], tmp_path / "loss.png", kind="loss", losses={run: losses})
        assert not (tmp_path / "loss.png").exists()


def at_perplexity(perplexity: float, bits: float) -> dict[str, list[float] | float]:
    return {"perplexity": perplexity, "exposure": [bits - 1, bits, bits + 1] * 3}


@pytest.fixture
def utility_seeds(make_run: MakeRun) -> list[RunResults]:
    """Return two seeds of a setting; the first has one more evaluation."""
    found = []
    for seed, points in enumerate(([(80, 1), (20, 3), (10, 7)], [(20, 2), (5, 5)])):
        rounds = {10 * place: at_perplexity(*point) for place, point in enumerate(points, 1)}
        found.append(read_run(make_run(rounds, name=f"seed-{seed}", seed=seed, series="a")))
    return found


def test_over_seeds_perplexity_is_a_geometric_mean(utility_seeds: list[RunResults]) -> None:
    figure = draw_against_utility(utility_seeds, over_seeds=True)
    (panel,) = figure.axes
    (line,) = panel.get_lines()
    assert np.asarray(line.get_data()) == pytest.approx(np.array([[40, 10], [1.5, 4]]))  # sqrt(80 20), sqrt(20 5)
    (bars,) = panel.collections
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]  # type: ignore[attr-defined]
    assert ends == [pytest.approx(t_interval(np.array(bits))) for bits in ([1.0, 2.0], [3.0, 5.0])]
    assert panel.get_xscale() == "log"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["IID, FedAvg, b_u = 16 (2 seeds)"]
    two = [replace(run, series=str(c), settings={"local.clip": c}) for run in utility_seeds for c in (0.5, 2.0)]
    (legend,) = draw_against_utility(two, over_seeds=True).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [f"IID, FedAvg, b_u = 16, clip {clip} (2 seeds)" for clip in (0.5, 2)]


def test_each_run_has_its_own_line_and_intervals_over_its_canaries(utility_seeds: list[RunResults]) -> None:
    (panel,) = draw_against_utility(utility_seeds).axes
    long, short = (np.asarray(line.get_data()) for line in panel.get_lines())
    assert long == pytest.approx(np.array([[80, 20, 10], [1, 3, 7]]))
    assert short == pytest.approx(np.array([[20, 5], [2, 5]]))
    first = panel.collections[0].get_segments()[0][:, 1].tolist()  # type: ignore[attr-defined]
    assert first == pytest.approx(t_interval(np.array([0.0, 1.0, 2.0] * 3)))


SPACE = 1024
GRID = ((0.1, 1.0),) * 3
# By canary: rank, estimated exposure, p of the fit, nodes up to the canary. None: the limit of nodes was exceeded.
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
    """Return for each line of round markers with points whether the markers are filled, and the points."""
    return [
        (line.get_markerfacecolor() != "none", np.asarray(line.get_data()).T.tolist())
        for line in lines
        if line.get_marker() == "o" and len(np.asarray(line.get_xdata()))
    ]


def note_of(figure: object) -> str:
    return " ".join(figure.get_supxlabel().split())  # type: ignore[attr-defined]


def test_markers_of_a_search_are_filled_if_it_finds_the_secret(run: RunResults) -> None:
    figure = draw_search(secret_pairs([run], SEARCH, "search"))
    (panel,) = figure.axes
    assert points(panel.get_lines()) == [(False, [[6, 20]]), (True, [[11, 4]])]
    (crosses,) = [line for line in panel.get_lines() if line.get_marker() == "x"]
    assert np.asarray(crosses.get_data()).tolist() == [[11], [8]]
    levels = [np.asarray(line.get_data()).tolist() for line in panel.get_lines() if line.get_marker() == "None"]
    assert levels == [[[10, 10], [0, 1]], [[0, 1], [SPACE, SPACE]]]  # log2 |R|, and brute force
    assert "1 of 3 points are not drawn" in note_of(figure)


def test_ranks_are_drawn_with_the_line_of_estimates(run: RunResults) -> None:
    """At 6 bits, 16 of 1,024 phrases are expected, and the rank is 8; at 11 bits, fewer than one phrase is expected."""
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


def test_missing_measures_are_named_with_a_remedy(make_run: MakeRun, run: RunResults, tmp_path: Path) -> None:
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


def test_a_checkpoint_has_the_measures_of_the_figures(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are at most the number of phrases. A search reads at least the nodes before a secret that it finds."""
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
