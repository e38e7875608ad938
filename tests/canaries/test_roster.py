"""The roster: what it says of canaries, what it does not need to say, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers import MakeCorpus

from flsim.base.errors import InputError
from flsim.canaries.planting import Overlay, drawn_and_planted, plant
from flsim.canaries.population import Partition, open_population, write_population
from flsim.canaries.roster import COUNTS, LATER, SCHEMA, read_canaries, read_roster, write_roster
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus
from flsim.data.records import Records
from flsim.data.vocabulary import Vocabulary

PLAIN = (Canary("c0", (7, 8), 1.0, 0.5), Canary("c1", (9, 8), 0.5, 1.0))
WORDS = Vocabulary(tuple(f"w{index}" for index in range(96)), tuple(range(96, 0, -1)))  # as `make_corpus` has them
TEMPLATE = Secrets.from_template("w8 {w1}", WORDS)
COPIES = tuple(replace(canary, p_u=np.nan, p_e=np.nan, copies=2) for canary in PLAIN)


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> Corpus:
    return make_corpus([[[1, 2], [3]]] * 8, vocabulary_size=100)


def listed(value: Any) -> Any:
    """Return a value as a roster has it: a template as its text."""
    return str(value) if isinstance(value, Secrets) else value


def read_back(corpus: Corpus, folder: Path, canaries: tuple[Canary, ...]) -> tuple[Canary, ...]:
    write_roster(folder, plant(corpus.split("train"), canaries, 0), corpus.vocabulary)
    return read_canaries(folder, corpus.vocabulary)


@pytest.mark.parametrize("canaries", [PLAIN, COPIES], ids=["probabilities", "copies"])
def test_canaries_that_are_planted_throughout_need_no_later_column(
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
@pytest.mark.parametrize("canaries", [PLAIN, COPIES], ids=["probabilities", "copies"])
def test_what_a_roster_says_further_is_read_back(
    corpus: Corpus, tmp_path: Path, canaries: tuple[Canary, ...], told: dict[str, Any]
) -> None:
    changed = (canaries[0], replace(canaries[1], **told))
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
    held = [words_of(users[user]) for users in (population, train) for user in range(len(train))]
    ours, theirs = held[: len(train)], held[len(train) :]
    assert sorted(record for user in ours for record in user) == sorted(record for user in theirs for record in user)
    if partition == "non-iid":
        assert ours == theirs


def words_of(records: Records) -> list[tuple[int, ...]]:
    """The records of a user, as tuples of words."""
    return [tuple(records[index].tolist()) for index in range(len(records))]
