"""Tests of canaries from the text of held-out users: their origin, and conclusions that their ranks do not allow."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TINY, Experiment, Flsim, MakeCorpus, train_here

import flsim as api
from flsim.base.errors import InputError
from flsim.canaries.planting import draw_canaries
from flsim.data.corpus import Corpus

Users = Callable[..., list[list[list[int]]]]
NATURAL = api.Canaries(insertions=(2,), count=20, length=4, controls=10, source="heldout")


@pytest.fixture
def corpus(make_corpus: MakeCorpus, random_users: Users) -> Corpus:
    """Make users as in `Experiment`, and nine held-out users: one quotes a user, and one has an unknown word."""
    train, heldout = random_users(24, 8, 36), random_users(9, 30, 36, seed=2)
    train[5][2] = [9, 1, 2, 3, 4, 9]
    heldout[0] = [[1, 2, 3, 4, word] for word in range(1, 31)]
    heldout[1] = [[1, 2, 37, 4, word] for word in range(1, 31)]
    return make_corpus(train, test=random_users(4, 8, 36, seed=1), heldout=heldout, vocabulary_size=40)


def records_of(corpus: Corpus, name: str) -> list[list[int]]:
    split = corpus.split(name)
    return [record.tolist() for user in range(len(split)) for record in split[user]]


def test_phrases_begin_records_of_held_out_users(corpus: Corpus) -> None:
    """Phrases of canaries and controls are used once, have known words only, and are in no train or test record."""
    canaries = draw_canaries(corpus, NATURAL, seed=0)
    records = [tuple(record) for record in records_of(corpus, "heldout")]
    beginnings = {record[:4] for record in records if len(record) >= 4}
    phrases = [canary.tokens for canary in canaries]
    assert len(set(phrases)) == 30
    assert set(phrases) <= beginnings
    assert all(corpus.layout.first_word <= word <= corpus.layout.last_word for phrase in phrases for word in phrase)
    others = [f" {' '.join(map(str, record))} " for name in ("train", "test") for record in records_of(corpus, name)]
    assert not [phrase for phrase in phrases if any(f" {' '.join(map(str, phrase))} " in other for other in others)]
    assert all(canary.is_natural for canary in canaries)
    assert [canary.is_planted for canary in canaries] == [True] * 20 + [False] * 10
    assert phrases != [canary.tokens for canary in draw_canaries(corpus, NATURAL, seed=1)]


def test_too_little_text_is_refused(corpus: Corpus, make_corpus: MakeCorpus, random_users: Users) -> None:
    with pytest.raises(InputError, match="larger text of held-out users"):
        draw_canaries(corpus, api.Canaries(insertions=(1,), count=500, length=8, source="heldout"), seed=0)
    nobody = make_corpus(random_users(4, 8, 36), vocabulary_size=40, name="nobody")
    with pytest.raises(InputError, match="held-out users have too few records"):
        draw_canaries(nobody, NATURAL, seed=0)


def test_arms_of_natural_text(corpus: Corpus, flsim: Flsim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack by scores works as on random words. Ranks prove nothing: no times and no bounds follow from them."""
    folder = corpus.path.parent
    monkeypatch.chdir(folder)
    Path("tiny.toml").write_text(TINY.replace("p_u = [0.2]\np_e = [0.5, 1.0]\ncount = 2", ""))
    natural = ("canaries.source='heldout'", "canaries.insertions=[3]", "canaries.count=20", "canaries.windows=[[0, 2]]")
    for arm in ("in", "out"):
        train_here(Experiment(folder), ("data.corpus='corpus'", f"canaries.arm='{arm}'", *natural))
        (folder / "run").rename(folder / arm)
    measured = api.measure_forgetting(folder / "in", folder / "out")
    assert measured.success["success"].notna().any()
    assert measured.times["median_time"].isna().all()
    assert any("likelier than random words" in note for note in measured.notes)
    code, out, _ = flsim("audit", folder / "in")
    assert code == 0
    assert 'a bound from ranks (canaries.count with canaries.source "words")' in " ".join(out.split())
    assert "rank among the first" not in out
