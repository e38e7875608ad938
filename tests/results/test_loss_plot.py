"""The figure of losses and exposure over epochs: its values, its units, and what it refuses."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import Flsim

from flsim.base.errors import InputError
from flsim.results.store import RunResults, read_run
from flsim.show.plots import draw_losses, plot

MakeRun = Callable[..., Path]
Metrics = dict[str, list[float] | float]


def measured(test_loss: float, bits: float, estimated: float | None = None) -> Metrics:
    metrics: Metrics = {"perplexity": math.exp(test_loss), "exposure": [bits] * 9}
    return metrics | ({} if estimated is None else {"extrapolated_exposure": [estimated] * 9})


@pytest.fixture
def seeds(make_run: MakeRun) -> list[RunResults]:
    """Two seeds, whose test loss is lowest after two epochs, and whose exposure is highest after three."""
    return [
        read_run(
            make_run(
                {10: measured(3, 1, 1 + seed), 20: measured(1, 4, 5 + seed), 30: measured(2, 6, 7 + seed)},
                name=f"seed-{seed}",
                seed=seed,
                series="a",
                rounds_per_epoch=10,
            )
        )
        for seed in (0, 2)
    ]


def test_losses_are_on_one_axis_and_estimated_exposure_on_the_other(seeds: list[RunResults]) -> None:
    losses = {run: {10: 3.5 + index, 20: 2.5 + index, 30: 0.5 + index} for index, run in enumerate(seeds)}
    figure = draw_losses(seeds, losses, over_seeds=True)
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


def test_without_estimates_exposure_is_by_rank_and_each_run_has_a_panel(
    seeds: list[RunResults], make_run: MakeRun
) -> None:
    other = read_run(make_run({10: measured(2, 3)}, name="other", rounds_per_epoch=10))
    figure = draw_losses([*seeds, other], {seeds[0]: {10: 1.0}})
    drawn = [panel for panel in figure.axes if panel.get_lines()]
    assert [panel.get_ylabel() for panel in drawn if "exposure" in panel.get_ylabel()] == ["exposure (bits)"] * 3
    ranked = [panel.get_lines()[0] for panel in drawn if "exposure" in panel.get_ylabel()]
    assert np.asarray(ranked[0].get_ydata()).tolist() == [1, 4, 6]


def test_the_command_reads_training_losses_from_the_log(flsim: Flsim, seeds: list[RunResults], tmp_path: Path) -> None:
    message = "seed-0, seed-2: rounds.jsonl has no training loss"
    code, _, printed = flsim("plot", "seed-0", "seed-2", "--kind", "loss", "--out", "loss.svg")
    assert (code, message in printed) == (2, True), printed
    for run in seeds:
        lines = [{"round": round_, "since": round_ - 10, "loss": 1.0} for round_ in (10, 20, 30)]
        (tmp_path / run.name / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert flsim("plot", "seed-0", "seed-2", "--kind", "loss", "--out", "loss.svg") == (0, "", "")
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")


def test_what_cannot_be_drawn_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    new = read_run(make_run(name="new", status="running"))
    decided = read_run(make_run({10: {"rs": [0.0] * 9, "perplexity": 3.0}}, name="decided"))
    for run, losses, message in (
        (new, {}, "new: not evaluated yet"),
        (decided, {}, "no training loss"),
        (decided, {10: 1.0}, "no evaluation has exposure; train without evaluation.decide"),
    ):
        with pytest.raises(InputError, match=message):
            plot([run], tmp_path / "loss.png", kind="loss", losses={run: losses})
        assert not (tmp_path / "loss.png").exists()
