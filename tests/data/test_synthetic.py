from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dumps import folder_bytes

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.data import synthetic
from flsim.data.corpus import Corpus
from flsim.data.manifest import SPLITS
from flsim.data.records import Records
from flsim.data.synthetic import (
    LONGEST_WORD,
    SPELLED,
    SYMBOLS,
    Language,
    Spellings,
    SyntheticHParams,
    draw_users,
    make_synthetic,
)

HPARAMS = SyntheticHParams(
    users=60,
    test_users=5,
    heldout_users=3,
    words_per_user=300,
    vocabulary_size=300,
    topics=8,
    heterogeneity=0.1,
    zipf=1.0,
    order=0.7,
)


def make(tmp_path: Path, hparams: SyntheticHParams = HPARAMS, seed: int = 0, name: str = "corpus") -> Corpus:
    return make_synthetic(tmp_path / name, hparams, seed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": 10**11}, "no space for 100,000,000,008 users of 300 words, which need at least 60,800 GB"),
        ({"words_per_user": 10**13}, "a user of 10,000,000,000,000 words needs"),
        ({"record_words": 11}, "record_words must be at least 12, found 11"),
        ({"by": "characters"}, "record_words must be at least 96, found 20"),
        ({"by": "letters"}, "by must be 'words', 'characters' or 'tokens'"),
    ],
)
def test_impossible_sizes_are_refused_at_once(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(tmp_path, replace(HPARAMS, **change))
    assert not list(tmp_path.iterdir())


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    corpora = [make(tmp_path, seed=seed, name=name) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    for corpus in corpora:
        Corpus.open(corpus.path, verify=True)
        assert [len(corpus.split(name)) for name in SPLITS] == [60, 3, 5]
    assert len({name for split in SPLITS for name in corpora[0].split(split).names}) == 68
    first, again, other = (folder_bytes(corpus.path) for corpus in corpora)
    assert first == again
    for name in ("train/tokens.u16", "train/records.i64", "heldout/records.i64", "test/records.i64"):
        assert first[name] != other[name]


def naive_user(language: Language, hparams: SyntheticHParams, seed: int, name: str) -> Records:
    """Draw a user position by position: all twelve words of every record, and a fresh word for each position."""
    rng = stream(seed, "synthetic user", name)
    words = language.successors.shape[1]
    mixture = rng.dirichlet(np.full(hparams.topics, hparams.heterogeneity))
    lengths = rng.integers(5, 12, -(-hparams.words_per_user // 5), endpoint=True)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), hparams.words_per_user) + 1]
    topic = rng.choice(hparams.topics, len(lengths), p=mixture)
    table = np.empty((len(lengths), 12), np.int64)
    table[:, 0] = language.draw_words(topic, rng.random(len(lengths)), words)
    for position in range(1, 12):
        fresh = language.draw_words(topic, rng.random(len(lengths)), words)
        following = language.successors[topic, table[:, position - 1], rng.integers(4, size=len(lengths))]
        table[:, position] = np.where(rng.random(len(lengths)) < hparams.order, following, fresh)
    return Records.from_lists([record[:length].tolist() for record, length in zip(table, lengths, strict=True)])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"order": 0.0},
        {"words_per_user": 1},
        {"vocabulary_size": 5, "topics": 1, "order": 1.0},
        {"vocabulary_size": 70_000, "topics": 1},
    ],
)
def test_users_equal_those_of_a_naive_draw(change: dict[str, float]) -> None:
    hparams = replace(HPARAMS, **change)  # type: ignore[arg-type]
    language = Language.draw(hparams, 5)
    names = [f"train{index}" for index in range(7)]
    drawn = draw_users(language, hparams, 5, names)
    users = [naive_user(language, hparams, 5, name) for name in names]
    assert drawn.user_records.tolist() == [len(user) for user in users]
    assert drawn.record_words.tolist() == [len(record) for user in users for record in user]
    assert drawn.tokens.tolist() == [word for user in users for word in user.tokens.tolist()]


def test_the_corpus_does_not_depend_on_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus in one part equals the corpus in parts of four users."""
    alone = folder_bytes(make(tmp_path, name="alone").path)
    monkeypatch.setattr(synthetic, "PART_WORDS", 4 * HPARAMS.words_per_user)
    assert folder_bytes(make(tmp_path, name="together").path) == alone


def test_more_users_do_not_change_the_words_of_others(tmp_path: Path) -> None:
    """Each user has a separate stream of random numbers; only the ranks of words depend on the number of users."""
    few, many = (make(tmp_path, replace(HPARAMS, users=users), name=str(users)) for users in (60, 61))
    for corpus in (few, many):
        assert corpus.split("train").names[:60] == few.split("train").names
    words = [
        [corpus.vocabulary.decode(record.tolist()) for user in range(60) for record in corpus.split("train")[user]]
        for corpus in (few, many)
    ]
    assert words[0] == words[1]


@pytest.mark.parametrize("zipf", [0.7, 1.3])
def test_words_follow_zipfs_law(tmp_path: Path, zipf: float) -> None:
    """Half of the mass has the common ranking; therefore, counts fall like 1 / rank^zipf or somewhat more slowly."""
    hparams = replace(HPARAMS, users=200, zipf=zipf, vocabulary_size=1_000)
    counts = np.array(make(tmp_path, hparams).vocabulary.counts, float)
    rank = np.arange(3, 60)
    slope = -np.polyfit(np.log(rank), np.log(counts[rank - 1]), 1)[0]
    assert zipf / 2 < slope < zipf + 0.1
    assert counts[:100].sum() > 0.3 * counts.sum()


def test_characters_spell_the_words_of_the_same_corpus(tmp_path: Path) -> None:
    words = make(tmp_path, name="words")
    spelled = make(tmp_path, replace(HPARAMS, by="characters", record_words=SPELLED), name="characters")
    assert spelled.vocabulary.by == "characters"
    assert sorted(spelled.vocabulary.words) == sorted(SYMBOLS)
    spellings = Spellings.draw(296, 0).texts
    assert len(set(spellings)) == 296
    assert max(map(len, spellings)) <= LONGEST_WORD
    assert sum(text.isdigit() for text in spellings) == 29  # the words 9, 19, ... 289
    for name in SPLITS:
        one, other = words.split(name), spelled.split(name)
        for user in range(len(one)):
            texts = [spelled.vocabulary.text(record.tolist()) for record in other[user]]
            assert texts == [
                " ".join(spellings[int(word[1:])] for word in words.vocabulary.decode(record.tolist()))
                for record in one[user]
            ]
    counts = Counter(spelled.vocabulary.text(spelled.split("train").tokens.tolist()))
    assert dict(zip(spelled.vocabulary.words, spelled.vocabulary.counts, strict=True)) == counts
