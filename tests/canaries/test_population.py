"""Populations and twins equal naive overlays: records, copies, sizes of users, and users in a round."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from dumps import peak_kilobytes
from helpers import Experiment, MakeCorpus
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from populations import split_of

from flsim.base.errors import InputError
from flsim.base.files import new_folder
from flsim.base.rng import stream
from flsim.canaries.planting import Overlay, Planting, drawn_and_planted, plant
from flsim.canaries.population import (
    COUNTS,
    LATER,
    SCHEMA,
    Partition,
    Population,
    make_twin,
    open_population,
    read_canaries,
    read_roster,
    verify_population,
    write_population,
    write_roster,
)
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus, CorpusWriter, Split, position_type
from flsim.data.records import Layout, Vocabulary
from flsim.runs.config import load
from flsim.runs.folder import Run

Sentences = list[list[int]]
RECORDS = st.lists(st.lists(st.integers(1, 95), max_size=6), max_size=9)
USERS = st.lists(RECORDS, min_size=1, max_size=8).filter(any)
PHRASES = ((90, 91, 92, 93, 94), (1, 2), (95,) * 7)


def planting_of(replaced: dict[int, int]) -> Planting:
    """Return a planting of `PHRASES`, with the canary of each replaced record."""
    records = sorted(replaced)
    overlay = Overlay(np.array(records, np.int64), np.array([replaced[record] for record in records], np.uint16))
    none = np.zeros(len(PHRASES), np.int64)
    canaries = tuple(Canary(f"c{index}", phrase, 1.0, 1.0) for index, phrase in enumerate(PHRASES))
    return Planting(canaries, overlay, none, none, none, none)


def population_of(split: Split, planting: Planting, seed: int | None) -> Population:
    phrases = tuple(np.array(phrase, np.uint16) for phrase in PHRASES)
    if seed is None:
        return Population(split, phrases, planting.overlay)
    twin, overlay = make_twin(split, planting, seed)
    return Population(split, phrases, overlay, twin)


def naive_partitions(users: list[Sentences], replaced: dict[int, int], seed: int) -> tuple[list[Sentences], ...]:
    """Return both partitions by lists: replace, shuffle, and deal until words are as many as in real users so far."""
    records = [record for user in users for record in user]
    planted = [list(PHRASES[replaced[i]]) if i in replaced else record for i, record in enumerate(records)]
    rest = iter(planted)
    real = [[next(rest) for _ in user] for user in users]
    shuffled = [planted[index] for index in stream(seed, "iid-twin").permutation(len(planted))]
    twin: list[Sentences] = []
    dealt = wanted = 0
    for user in real:
        wanted += sum(map(len, user))
        hand: Sentences = []
        while dealt < wanted:
            record = shuffled.pop(0)
            hand.append(record)
            dealt += len(record)
        twin.append(hand)
    twin[-1] += shuffled  # records without words may remain
    return real, twin


@settings(max_examples=60)
@given(users=USERS, data=st.data(), seed=st.integers(0, 1_000), window=st.integers(1, 9))
def test_both_partitions_equal_lists_of_lists(
    users: list[Sentences], data: st.DataObject, seed: int, window: int
) -> None:
    """This holds for any overlay and users, in any order, and for any size of the pieces in which the twin is made."""
    count = sum(map(len, users))
    replaced = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, len(PHRASES) - 1)))
    split, planting = split_of(users), planting_of(replaced)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsim.data.records.WINDOW", window)
        partitions = population_of(split, planting, None), population_of(split, planting, seed)
    assert all(Counter(each.overlay.canaries.tolist()) == Counter(replaced.values()) for each in partitions)
    for partition, expected in zip(partitions, naive_partitions(users, replaced, seed), strict=True):
        assert len(partition) == len(users)
        for user in data.draw(st.permutations(range(len(users)))):
            records = partition[user]
            assert [record.tolist() for record in records] == expected[user]
            assert [array.dtype for array in (records.tokens, records.offsets)] == ["uint16", "int64"]
            assert records.words == sum(map(len, expected[user]))


def test_orders_of_more_records_than_uint32_counts_are_wider() -> None:
    assert [position_type(records) for records in (2**32 - 1, 2**32)] == ["<u4", "<i8"]


@settings(max_examples=50)
@given(USERS, st.sets(st.integers(0, 71)), st.integers(1, 9), st.none() | st.integers(0, 99))
def test_copies_that_a_cap_may_leave_out_are_counted(
    users: list[Sentences], replaced: set[int], cap: int, seed: int | None
) -> None:
    records = sum(map(len, users))
    population = population_of(
        split_of(users), planting_of({record: record % 3 for record in replaced if record < records}), seed
    )
    phrases = set(PHRASES)
    assume(not any(tuple(record) in phrases for user in users for record in user))
    beyond, kept = 0, 0.0
    for user in range(len(population)):
        held = [tuple(record.tolist()) for record in population[user]]
        if len(held) > cap:
            copies = sum(record in phrases for record in held)
            beyond, kept = beyond + copies, kept + copies * cap / len(held)
    copies, trained_on = population.copies_beyond(cap)
    assert copies == beyond
    assert trained_on == pytest.approx(kept)


@pytest.mark.parametrize("file", ["roster.parquet", "overlay.i64", "overlay.u16", "twin.u32", "twin_users.i64"])
def test_damaged_files_are_refused(make_corpus: MakeCorpus, tmp_path: Path, file: str) -> None:
    """This holds if one bit differs, or if the file is truncated or missing."""
    corpus = make_corpus([[[1, 2], [3]]] * 3, vocabulary_size=100)
    folder = tmp_path / "planted"
    folder.mkdir()
    write_population(folder, corpus, plant(corpus.split("train"), (Canary("c0", (7, 8), 1.0, 1.0),), 0), "iid", 0)
    verify_population(folder)
    open_population(folder, corpus)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    for damage in ("bit", "cut", "missing"):
        if damage == "cut":
            (folder / file).write_bytes(whole[:-1])
        elif damage == "missing":
            (folder / file).unlink()
        with pytest.raises(InputError, match=f"{file}: the file is missing, or changed after planting"):
            verify_population(folder)
        if damage != "bit":
            with pytest.raises(InputError, match="its planted canaries cannot be read"):
                open_population(folder, corpus)


MAKE = """
import sys
from pathlib import Path
from flsim.canaries.planting import draw_canaries, plant
from flsim.canaries.population import open_population, write_population
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus
corpus, folder = Corpus.open(Path(sys.argv[1])), Path(sys.argv[2])
folder.mkdir()
canaries = draw_canaries(corpus, CanaryHParams(), 0)
write_population(folder, corpus, plant(corpus.split("train"), canaries, 0), "iid", 0)
open_population(folder, corpus)
"""


def test_planting_and_dealing_a_large_corpus_takes_little_memory(tmp_path: Path) -> None:
    """2,000 users of 500 records of 20 words have 48 MB; the twin needs 6 MB, at 6 bytes a record; pieces have 8 MB."""
    layout = Layout(10_000)
    vocabulary = Vocabulary(tuple(f"w{index}" for index in range(layout.words)), (1,) * layout.words)
    peaks = []
    for users in (4, 2_000):
        with new_folder(tmp_path / f"{users}") as folder, CorpusWriter(folder, vocabulary, layout) as writer:
            tokens = stream(0, "tokens").integers(1, layout.words, users * 10_000, np.uint16)
            names = [f"u{index}" for index in range(users)]
            writer.splits["train"].extend(names, tokens, np.full(users * 500, 20), np.full(users, 500))
            writer.finish(dropped={}, sources=[], parameters={})
        peaks.append(peak_kilobytes(MAKE, tmp_path / f"{users}", tmp_path / f"planted{users}"))
    assert peaks[1] - peaks[0] < 40_000


# Twins: runs that differ only in the data partition have the same users in each round.


def cohorts(run: Run, rounds: int) -> list[list[list[int]]]:
    """Return the users that each shard trains in each round."""
    state, training = run.latest_state(), run.federated.training_of(run.users, rounds)
    return [
        [request.users.tolist() for request in training.requests(replace(state, round=round_))]
        for round_ in range(rounds)
    ]


@pytest.mark.parametrize("sampler", ["fixed-size", "poisson"])
def test_both_runs_ask_the_same_users_and_train_as_long(
    make_corpus: MakeCorpus, experiment: Experiment, sampler: str
) -> None:
    """Users have very different sizes, which reveals exchanged users; the length is in epochs; records are capped."""
    sizes = [[[1 + (user + record) % 30] * (1 + record % 9) for record in range(1 + 2 * user)] for user in range(16)]
    make_corpus(sizes, test=[[[1, 2]]], vocabulary_size=40, name="uneven")
    text = experiment.config.read_text().replace("rounds = 4", "epochs = 3.0")
    experiment.config.write_text(text)
    overrides = (f"data.corpus={experiment.folder}/uneven", f"training.sampler={sampler}", "local.max_records=4")
    real, twin = (
        Run.create(load(experiment.config, [f"data.partition={partition}", *overrides]), experiment.folder / partition)
        for partition in ("non-iid", "iid")
    )
    assert [canary.tokens for canary in real.canaries] == [canary.tokens for canary in twin.canaries]
    assert (real.rounds, real.rounds_per_epoch, real.population) == (
        twin.rounds,
        twin.rounds_per_epoch,
        twin.population,
    )
    asked = cohorts(real, real.rounds)
    assert asked == cohorts(twin, real.rounds)
    assert len({str(round_) for round_ in asked}) > 1
    assert [real.users[user].tokens.tolist() for user in range(16)] != [
        twin.users[user].tokens.tolist() for user in range(16)
    ]


# The roster: its columns, the columns that it can omit, and the values that are refused.

PLAIN = (Canary("c0", (7, 8), 1.0, 0.5), Canary("c1", (9, 8), 0.5, 1.0))
WORDS = Vocabulary(tuple(f"w{index}" for index in range(96)), tuple(range(96, 0, -1)))  # as in `make_corpus`
TEMPLATE = Secrets.from_template("w8 {w1}", WORDS)
COPIES = tuple(replace(canary, p_u=np.nan, p_e=np.nan, copies=2) for canary in PLAIN)


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> Corpus:
    return make_corpus([[[1, 2], [3]]] * 8, vocabulary_size=100)


def listed(value: Any) -> Any:
    """Return a value as a roster stores it: a template as its text."""
    return str(value) if isinstance(value, Secrets) else value


def read_back(corpus: Corpus, folder: Path, canaries: tuple[Canary, ...]) -> tuple[Canary, ...]:
    write_roster(folder, plant(corpus.split("train"), canaries, 0), corpus.vocabulary)
    return read_canaries(folder, corpus.vocabulary)


@pytest.mark.parametrize("canaries", [PLAIN, COPIES], ids=["probabilities", "copies"])
def test_canaries_of_all_rounds_need_no_optional_column(
    corpus: Corpus, tmp_path: Path, canaries: tuple[Canary, ...]
) -> None:
    assert [repr(canary) for canary in read_back(corpus, tmp_path, canaries)] == [repr(canary) for canary in canaries]
    assert pq.read_schema(tmp_path / "roster.parquet").names == [name for name in SCHEMA.names if name not in LATER]
    table = read_roster(tmp_path / "roster.parquet")
    assert table["is_planted"].all()
    assert table["words"].map(len).tolist() == [2, 2]


@pytest.mark.parametrize(
    "told",
    [{"is_planted": False}, {"first_round": 3}, {"last_round": 9}, {"template": TEMPLATE}],
    ids=lambda told: next(iter(told)),
)
def test_optional_columns_of_a_roster_are_read_back(corpus: Corpus, tmp_path: Path, told: dict[str, Any]) -> None:
    changed = (COPIES[0], replace(COPIES[1], **told))
    assert [repr(canary) for canary in read_back(corpus, tmp_path, changed)] == [repr(canary) for canary in changed]
    table = read_roster(tmp_path / "roster.parquet")
    assert {name: table[name][1] for name in told} == {name: listed(value) for name, value in told.items()}
    assert {*LATER} & {*pq.read_schema(tmp_path / "roster.parquet").names} == {*told}


def test_copies_of_a_control_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    control = (PLAIN[0], replace(PLAIN[1], is_planted=False))
    planting = replace(plant(corpus.split("train"), control, 0), overlay=Overlay(np.array([1]), np.array([1], "u2")))
    write_population(tmp_path, corpus, planting, "non-iid", 0)
    with pytest.raises(InputError, match="its planted canaries cannot be read"):
        open_population(tmp_path, corpus)


def test_missing_values_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    read_back(corpus, tmp_path, (PLAIN[0], replace(PLAIN[1], is_planted=False)))
    path = tmp_path / "roster.parquet"
    pd.read_parquet(path).assign(is_planted=pd.array([True, None], "boolean")).to_parquet(path)
    with pytest.raises(InputError, match="cells of column is_planted are missing"):
        read_roster(path)
    with pytest.raises(ValueError, match="null"):
        read_canaries(tmp_path, corpus.vocabulary)


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_without_canaries_a_population_is_the_corpus_and_its_roster_is_empty(
    corpus: Corpus, tmp_path: Path, partition: Partition
) -> None:
    (tmp_path / "planted").mkdir()
    planting = drawn_and_planted(corpus, CanaryHParams(count=0), 0)
    write_population(tmp_path / "planted", corpus, planting, partition, 0)
    population, canaries = open_population(tmp_path / "planted", corpus)
    assert canaries == ()
    roster = read_roster(tmp_path / "planted" / "roster.parquet")
    assert list(roster) == ["canary", "tokens", "words", "p_u", "p_e", *COUNTS, "is_planted"]
    assert len(roster) == 0
    train = corpus.split("train")
    ours, theirs = ([tuple(r.tolist()) for user in range(8) for r in users[user]] for users in (population, train))
    assert sorted(ours) == sorted(theirs)
    assert partition == "iid" or ours == theirs
