"""Words that tell trainings of the same name apart: values of the settings in which they differ, and no others."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shown import over_seeds

from flsim.results.seeds import distinctions
from flsim.results.store import RunResults

MakeSeries = Callable[..., list[RunResults]]


def told_apart(make_series: MakeSeries, *settings: Mapping[str, Any], labels: str = "") -> list[str]:
    [run] = make_series([1])
    of_runs = zip(settings, labels or "A" * len(settings), strict=True)
    return distinctions([replace(run, settings=of_run, label=label) for of_run, label in of_runs])


def test_values_of_the_settings_that_differ(make_series: MakeSeries) -> None:
    common = {"model.architecture": "lstm", "canaries.count": 8}
    words = told_apart(
        make_series,
        {**common, "model.units": 15, "privacy.clip": 0.5, "canaries.insertions": [1]},
        {**common, "model.units": 30, "privacy.clip": 10.0, "canaries.insertions": [1]},
        {**common, "model.units": 30, "canaries.insertions": [1, 10]},
    )
    assert words == [
        ", units 15, clip 0.5, insertions 1",
        ", units 30, clip 10, insertions 1",
        ", units 30, insertions 1 10",
    ]


def test_seeds_machines_and_places_of_a_corpus_tell_nothing_apart(make_series: MakeSeries) -> None:
    words = told_apart(
        make_series,
        {"seed": 0, "data.corpus": "/a", "system.shards": 1},
        {"seed": 1, "data.corpus": "/b", "system.shards": 2},
    )
    assert words == ["", ""]


def test_a_table_over_seeds_has_the_words(make_series: MakeSeries) -> None:
    runs = [
        replace(run, settings={"model.units": units, "seed": run.seed})
        for units in (15, 30)
        for run in make_series([1, 2], name=f"of-{units}")
    ]
    [first, second] = over_seeds(runs)["setting"]
    assert first == f"{runs[0].setting}, units 15"
    assert second == f"{runs[0].setting}, units 30"
