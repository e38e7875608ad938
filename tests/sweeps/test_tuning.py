"""Tests of the files of `flsim tune` and of its outcome: their meaning, and what is refused before training."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from helpers import assert_refused

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.results.sweeps import read_sweep, tuned_notes
from flsim.runs.sweeps.definition import (
    GroupOutcome,
    Planned,
    Trial,
    TuningOutcome,
    load,
    planned_runs,
    read_outcome,
    training_digest,
    tuned_of,
)
from flsim.runs.sweeps.folder import TUNED, Search, SweepFolder, TuningFolder, load_search, shortened
from server.sweep import JobEnd, SweepJob, Tuner

RATE = "local.learning_rate"
SMALL: dict[str, Any] = {"users": 12, "test_users": 2, "heldout_users": 0, "words_per_user": 60, "vocabulary_size": 50}
SWEEP: dict[str, Any] = {
    "title": "t",
    "question": "q",
    "base": {"evaluation": {"also": ["space"], "every": 2}, "canaries": {"p_u": [0.5]}},
    "grids": [{"name": "a", "axes": {"data.partition": ["iid", "non-iid"], "training.cohort": [2, 3]}}],
    "tiers": {"smoke": {"about": "x", "corpus": {"synthetic": SMALL}, "seeds": [0, 1]}},
}
TUNE: dict[str, Any] = {
    "sweep": "sweep.toml",
    "by": ["data.partition"],
    "seeds": [7, 8],
    "tiers": {"smoke": {"grids": {"a": {RATE: {"low": 0.1, "high": 12.8}}}}},
}


def merged(into: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return nested values with the changes merged into them."""
    parts = {
        key: merged(into[key], value) if isinstance(value, dict) and isinstance(into.get(key), dict) else value
        for key, value in change.items()
    }
    return into | parts


def write_files(tmp_path: Path, tune: dict[str, Any] | None = None, sweep: dict[str, Any] | None = None) -> Path:
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(merged(SWEEP, sweep or {})))
    (tmp_path / "tune.toml").write_text(tomli_w.dumps(merged(TUNE, tune or {})))
    return tmp_path / "tune.toml"


def search_of(path: Path) -> Search:
    return load_search(path, "smoke", path.parent)


def outcome(path: Path, **changes: Any) -> TuningOutcome:
    """Write and return an outcome with learning rate 0.4 for IID users, and 3.2 for non-IID users."""
    groups = tuple(
        GroupOutcome(
            name=f"a-{partition}",
            grid="a",
            axes={"data.partition": partition},
            values={RATE: rate},
            perplexity=30.0,
            widenings=widenings,
            trials=(Trial({RATE: rate}, [40.0, 30.0]), Trial({RATE: 12.8}, [math.inf])),
        )
        for partition, rate, widenings in (("iid", 0.4, 0), ("non-iid", 3.2, 1))
    )
    definition = load(path.parent / "sweep.toml")
    values: dict[str, Any] = {
        "title": "t",
        "tier": "smoke",
        "training": training_digest(definition, definition.tiers["smoke"], {RATE}),
        "search": "0123456789abcdef",
        "objective": "perplexity on test users",
        "method": "grid",
        "trials": 8,
        "halving": (0.5, 1.0),
        "runs": 2,
        "by": ("data.partition",),
        "seeds": (7, 8),
        "corpus": "0" * 64,
        "has_own_corpus": True,
        "groups": groups,
    }
    tuned = TuningOutcome(**(values | changes))
    tuned.write(path)
    return tuned


def planned(tmp_path: Path, **options: Any) -> list[Planned]:
    source = tmp_path / "sweep.toml"
    definition = load(source)
    return planned_runs(definition, definition.tiers["smoke"], tmp_path / "corpus", str(source), **options)


def test_a_trial_has_the_runs_of_its_group_and_measures_only_utility(tmp_path: Path) -> None:
    search = search_of(write_files(tmp_path))
    first, second = search.groups()
    assert [group.name for group in (first, second)] == ["a-iid", "a-non-iid"]
    runs = search.runs_of(second, 3, {RATE: 0.8})
    assert [(run.axes["training.cohort"], run.seed) for run in runs] == [(2, 7), (2, 8), (3, 7), (3, 8)]
    assert runs[0].name == "t03-a-non-iid-cohort2-seed7"
    for run in runs:
        config = run.config
        assert config.data.partition == "non-iid"
        assert config.local.learning_rate == 0.8  # type: ignore[attr-defined]
        assert (config.evaluation.utility_only, config.evaluation.also, config.system.tracking) == (True, (), ())
        assert (config.canaries.p_u, config.canaries.count) == ((0.5,), 10)
        assert config.evaluation.every > config.training.rounds  # type: ignore[attr-defined]


def test_a_share_of_a_run_is_the_same_run_with_fewer_rounds(tmp_path: Path) -> None:
    write_files(tmp_path, sweep={"base": {"training": {"rounds": 10}}})
    make_synthetic(tmp_path / "corpus", SyntheticHParams(**SMALL), 0)
    search = search_of(tmp_path / "tune.toml")
    train = Corpus.open(tmp_path / "corpus").split("train")
    run = search.planned("a", {RATE: 0.8})[0]
    for share, rounds in ((0.25, 3), (0.5, 5), (1.0, 10)):
        config, at = shortened(run.config, share, train)
        assert (at, config.rounds_over(train), config.digest) == (rounds, rounds, run.config.digest)


@pytest.mark.parametrize(
    ("tune", "sweep", "message"),
    [
        ({"trials": 4}, {}, "trials must be at least 8, found 4"),
        ({"by": ["model.units"]}, {}, "model.units is not an axis of"),
        ({"tiers": {"smoke": {"corpus_seed": 0}}}, {}, "corpus_seed 0 gives the corpus of the sweep"),
        ({"tiers": {"smoke": {"grids": {"a": {RATE: {"low": 2.0, "high": 1.0}}}}}}, {}, "a range needs low < high"),
        (
            {"tiers": {"smoke": {"grids": {"a": {"training.cohort": {"low": 1.0, "high": 2.0}}}}}},
            {},
            "tune.toml: tiers.smoke.grids.a: training.cohort is an axis of this grid in",
        ),
        ({}, {"base": {"local": {"schedule": "linear"}}}, "set halving = [1.0]"),
        (
            {"tiers": {"smoke": {"grids": {"b": {RATE: {"low": 0.1, "high": 1.0}}}}}},
            {"grids": [*SWEEP["grids"], {"name": "b", "axes": {}}]},
            "groups have unequal numbers of runs per trial: a-iid 4, a-non-iid 4, b 2",
        ),
    ],
)
def test_bad_searches_are_refused(tmp_path: Path, tune: dict[str, Any], sweep: dict[str, Any], message: str) -> None:
    write_files(tmp_path, tune, sweep)
    assert_refused(tmp_path, ["tune", "tune.toml"], message)


def test_other_files_are_not_searches(tmp_path: Path) -> None:
    write_files(tmp_path)
    for arguments, message in (
        (["tune", "sweep.toml"], "not a search, because it names no sweep"),
        (["tune", "tune.toml", "--tier", "paper"], "there is no tier 'paper'; choose one of smoke"),
        (["sweep", "tune.toml"], "not a sweep, because it has no grids"),
    ):
        assert_refused(tmp_path, arguments, message)


def test_a_sweep_uses_the_chosen_values_and_names_the_search(tmp_path: Path) -> None:
    write_files(tmp_path)
    without = [run.name for run in planned(tmp_path)]
    write_files(tmp_path, sweep={"tiers": {"smoke": {"tuned": "tuned.toml"}}})
    written, read = outcome(tmp_path / "tuned.toml"), read_outcome(tmp_path / "tuned.toml")
    assert (read.groups, read.seeds, read.halving) == (written.groups, (7, 8), (0.5, 1.0))
    assert read.groups[0].trials[1].has_diverged
    runs = planned(tmp_path)
    assert [run.name for run in runs] == without  # names do not change
    rates = {(run.config.data.partition, run.config.local.learning_rate) for run in runs}  # type: ignore[attr-defined]
    assert rates == {("iid", 0.4), ("non-iid", 3.2)}
    definition, folder = load(tmp_path / "sweep.toml"), SweepFolder(tmp_path / "out")
    tuned = tuned_of(definition, definition.tiers["smoke"], str(tmp_path / "sweep.toml"))
    with folder.hold_lock():
        folder.write(tmp_path / "sweep.toml", definition, "smoke", runs, "flsim sweep", tuned)
    (note,) = tuned_notes([folder.path])
    assert tuned_notes([folder.path / "runs" / run.name for run in runs]) == [note]
    assert note == read_sweep(folder.path).tuned
    assert read_sweep(folder.path).chosen == ["local.learning_rate"]
    for part in (
        "chosen by perplexity on test users only, never by canaries (search 0123456789ab)",
        "local.learning_rate 0.4 for a-iid; local.learning_rate 3.2 for a-non-iid.",
        "8 trials (grid) of 2 runs, halved after 50%",
        "Stability limits 2 of 2 groups",
    ):
        assert part in note
    assert read_outcome(folder.path / "tuned.toml").search == "0123456789abcdef"


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["--seeds", "6-8"], {}, "seed 7: tuned.toml was tuned on this seed, so results of this seed must not be"),
        (["--set", f"{RATE}=1.0"], {}, f"--set {RATE}: the search in tuned.toml chose this setting; remove `tuned`"),
        ([], {"title": "another"}, "tuned.toml: this file is for tier smoke of 'another'; run `flsim tune`"),
        ([], {"training": "0"}, "tuned.toml: this file is for other grids or settings of training than those of"),
        ([], {"groups": ()}, "tuned.toml: no values were tuned for grid a with data.partition iid, training.cohort 2"),
    ],
)
def test_seeds_and_settings_of_the_search_and_outcomes_of_other_sweeps_are_refused(
    tmp_path: Path, arguments: list[str], changes: dict[str, Any], message: str
) -> None:
    write_files(tmp_path, sweep={"tiers": {"smoke": {"tuned": "tuned.toml"}}})
    outcome(tmp_path / "tuned.toml", **changes)
    assert_refused(tmp_path, ["sweep", "sweep.toml", *arguments], message)


def test_the_corpus_of_the_search_is_not_reported(tmp_path: Path) -> None:
    write_files(tmp_path, sweep={"tiers": {"smoke": {"tuned": "tuned.toml"}}})
    corpus = make_synthetic(tmp_path / "mine", SyntheticHParams(**SMALL), 1)
    outcome(tmp_path / "tuned.toml", corpus=corpus.digest)
    message = "tuned.toml was tuned on this corpus, so results on it must not be reported; use another corpus"
    assert_refused(tmp_path, ["sweep", "sweep.toml", "--corpus", "mine"], message)
    read_outcome(tmp_path / "tuned.toml").refuse_corpus("1" * 64, "another corpus")


def test_the_digest_of_an_outcome_covers_the_training_that_was_tuned(tmp_path: Path) -> None:
    """Measurement, seeds and tuned settings may change; other settings of training, canaries and axes may not."""

    def digest_with(change: dict[str, Any]) -> str:
        write_files(tmp_path, sweep=change)
        definition = load(tmp_path / "sweep.toml")
        return training_digest(definition, definition.tiers["smoke"], {RATE})

    same = digest_with({})
    assert digest_with({"base": {"evaluation": {"every": 3}}, "tiers": {"smoke": {"seeds": [5], "tuned": "x"}}}) == same
    assert digest_with({"base": {"local": {"learning_rate": 0.7}}}) == same
    for change in (
        {"base": {"training": {"rounds": 9}}},
        {"base": {"canaries": {"p_u": [0.1]}}},
        {"tiers": {"smoke": {"set": {"model": {"units": 9}}}}},
        {"tiers": {"smoke": {"grids": {"a": {"axes": {"training.cohort": [2, 4]}}}}}},
    ):
        assert digest_with(change) != same


@pytest.mark.parametrize("text", ["", "title = 3", "x = 1"])
def test_a_damaged_outcome_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"tuned\.toml: no such file, but a tier needs its settings"):
        read_outcome(tmp_path / "tuned.toml")
    (tmp_path / "tuned.toml").write_text(text)
    with pytest.raises(InputError, match=r"tuned\.toml: "):
        read_outcome(tmp_path / "tuned.toml")


class Trainer:
    """A replacement of `server.sweep.train_all` that measures jobs in a given order, until a kill after some jobs."""

    def __init__(self, order: Callable[[list[SweepJob]], Iterable[SweepJob]], killed_after: int = 10**9) -> None:
        self.order, self.left = order, killed_after
        self.measured: dict[tuple[str, int], float] = {}

    def __call__(self, jobs: list[SweepJob], *_: object) -> Iterator[JobEnd]:
        for job in self.order(jobs):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            rate, rounds = job.config.local.learning_rate, job.config.training.rounds  # type: ignore[attr-defined]
            assert (job.name, rounds) not in self.measured, "a finished trial was trained again"
            perplexity = math.inf if rate > 3 else 20 + abs(math.log(rate)) + 1 / rounds
            self.measured[job.name, rounds] = perplexity
            yield JobEnd(job.name, None)


def test_the_order_of_runs_and_a_kill_do_not_change_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that diverge, at rates above 3, stop no search. Trials measured before the kill are not trained again."""
    grid = {"name": "a", "axes": {"data.partition": ["iid", "non-iid"]}}
    write_files(tmp_path, {"seeds": [7]}, {"base": {"training": {"rounds": 8, "cohort": 2}}, "grids": [grid]})
    search = search_of(tmp_path / "tune.toml")
    corpus = search.open_corpus(tmp_path)

    def tune(name: str, trainer: Trainer) -> bytes:
        folder = TuningFolder(tmp_path / name)
        monkeypatch.setattr("server.sweep.train_all", trainer)
        monkeypatch.setattr(TuningFolder, "perplexity", lambda _, *run: trainer.measured.get(run))
        with folder.hold_lock():
            Tuner(folder, search, corpus.split("train")).tune(corpus.digest)
        return (folder.path / TUNED).read_bytes()

    whole = tune("one", Trainer(lambda jobs: jobs))
    assert tune("two", Trainer(lambda jobs: reversed(jobs))) == whole
    trainer = Trainer(lambda jobs: sorted(jobs, key=lambda job: job.file.name), killed_after=18)
    with pytest.raises(KeyboardInterrupt):
        tune("killed", trainer)
    trainer.left = 10**9
    assert tune("killed", trainer) == whole
    groups = read_outcome(tmp_path / "one" / TUNED).groups
    assert [(group.values, group.is_limited_by_stability) for group in groups] == [({RATE: 0.8}, False)] * 2
    assert [[trial.has_diverged for trial in group.trials] for group in groups] == [[False] * 5 + [True] * 3] * 2
