"""Tests of imports with a tokenizer: restored text, ids that permute the tokenizer's, and users independent of it."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_folders
from dumps import folder_bytes, write_jsonl
from helpers import Flsim
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from flsim.base.errors import InputError
from flsim.canaries.planting import draw_canaries
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus
from flsim.data.importing import gather
from flsim.data.importing.gather import ImportHParams, passages, split_of, write_users
from flsim.data.importing.tasks import import_corpus
from flsim.data.synthetic import SyntheticHParams
from flsim.data.tokenizer import SMALLEST, Tokenizer, TokenVocabulary
from flsim.measures.memorization.score import references

WORDS = [f"{start}{end}" for start in ("ba", "de", "ki", "lo", "mu", "ra") for end in ("nas", "rel", "tif", "vok")]
HPARAMS = ImportHParams(vocabulary_size=300, record_words=16, words_per_user=60, heldout=0.2, test=0.2, by="tokens")
WHOLE = replace(HPARAMS, words_per_user=None, heldout=0, test=0)


def posts(changed: Callable[[str], bool] = lambda author: False) -> list[tuple[str, str]]:
    """Return posts of 30 authors; authors that are `changed` write in capitals, and therefore in other words."""
    rng = random.Random(0)
    made = []
    for number in range(300):
        author, text = f"a{number % 30}", " ".join(rng.choices(WORDS, k=rng.randint(3, 30)))
        made.append((author, f"{text.upper() if changed(author) else text.capitalize()}. Naïve 日本!\n\tBye\n"))
    return made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("tokens")
    return import_corpus([write_jsonl(folder / "a.jsonl", posts())], folder / "corpus", HPARAMS)


def texts_of(corpus: Corpus, split: str = "train") -> list[str]:
    """Return the text of each user."""
    users = corpus.split(split)
    return [corpus.vocabulary.text(users[user].tokens.tolist()) for user in range(len(users))]


@settings(max_examples=15)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1))
def test_any_text_is_restored_from_its_tokens(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    """Texts of one author keep capitals, spaces, tabs, line feeds and all scripts; empty texts are dropped."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = tokenizer_folders.gpt2_like(folder / "tokenizer")
    source = write_jsonl(folder / "a.jsonl", [("a", text) for text in [*texts, "end"]])
    made = import_corpus([source], folder / "corpus", WHOLE, tokenizer=tokenizer)
    kept = [text for text in [*texts, "end"] if text.strip()]
    assert texts_of(made) == ["".join(kept)]
    lengths = [len(Library.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids) for text in kept]
    cut = [[16] * (length // 16) + [length % 16] * (length % 16 > 0) for length in lengths]
    assert [len(record) for record in made.split("train")[0]] == [length for part in cut for length in part]


@given(text=st.text(), most=st.none() | st.integers(1, 5))
def test_passages_are_the_text_and_have_equally_many_words(text: str, most: int | None) -> None:
    parts = list(passages(text, most))
    assert "".join(part for _, part in parts) == text
    assert [words for words, _ in parts[:-1]] == [most] * (len(parts) - 1)
    ((total, _),) = passages(text, None)
    assert sum(words for words, _ in parts) == total
    assert most is None or parts[-1][0] <= most


def test_users_do_not_depend_on_the_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    """Names and texts of users are equal. A user ends after the text that reaches 60 words; a text has at most 34."""
    source = write_jsonl(tmp_path / "a.jsonl", posts())
    other = import_corpus([source], tmp_path / "o", HPARAMS, tokenizer=tokenizer_folders.gpt2_like(tmp_path / "t"))
    for split in corpus.splits:
        assert corpus.split(split).names == other.split(split).names
        assert texts_of(corpus, split) == texts_of(other, split)
    words = [sum(words for words, _ in passages(text, None)) for text in texts_of(corpus)]
    assert len(words) > 20
    assert min(words) >= 60
    assert max(words) < 60 + 34


def test_ids_are_a_permutation_of_the_tokenizers(corpus: Corpus) -> None:
    """Tokens equal those of the tokenizers library and of transformers; the ids of words come first, by frequency."""
    assert corpus.token_map is not None
    assert isinstance(corpus.vocabulary, TokenVocabulary)
    train, tokens, layout = corpus.split("train"), corpus.token_map, corpus.layout
    library = Library.from_file(str(tokens.folder / "tokenizer.json"))
    other = AutoTokenizer.from_pretrained(tokens.folder)
    for post in posts():
        ids = library.encode(post[1]).ids
        assert tokens.ids[corpus.vocabulary.encode_text(post[1])].tolist() == ids
        assert other.encode(post[1], add_special_tokens=False) == ids
    assert sorted(tokens.ids.tolist()) == list(range(300))
    assert [other.pad_token_id, other.unk_token_id, other.bos_token_id, other.eos_token_id] == [
        tokens.ids[id_] for id_ in (layout.pad, layout.oov, layout.bos, layout.eos)
    ]
    counts = np.bincount(train.tokens, minlength=300)
    assert counts[layout.text_ids.start : layout.text_ids.stop].tolist() == list(corpus.vocabulary.counts)
    for first, last in ((layout.first_word, layout.last_word), (layout.last_word + 1, layout.oov - 1)):
        in_order = counts[first : last + 1].tolist()
        assert in_order == sorted(in_order, reverse=True)
    for id_ in layout.text_ids:
        text = corpus.vocabulary.text([id_])
        assert (id_ <= layout.last_word) <= (text[:1] == " " and text[1:].isalpha()), text
    assert corpus.vocabulary.words[0] == library.id_to_token(int(tokens.ids[layout.first_word]))


def test_only_train_users_train_the_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    def is_of(split: str) -> Callable[[str], bool]:
        return lambda author: (split_of(author, 0.2, 0.2, 0) == "train") == (split == "train")

    def tokenizer_of(changed: str) -> bytes:
        source = write_jsonl(tmp_path / f"{changed}.jsonl", posts(is_of(changed)))
        made = import_corpus([source], tmp_path / changed, HPARAMS)
        return (made.path / "tokenizer" / "tokenizer.json").read_bytes()

    mine = (corpus.path / "tokenizer" / "tokenizer.json").read_bytes()
    assert tokenizer_of("others") == mine
    assert tokenizer_of("train") != mine


def test_an_import_repeats_with_any_number_of_processes(corpus: Corpus, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", posts())
    again = import_corpus([source], tmp_path / "corpus", HPARAMS, workers=2)
    assert folder_bytes(again.path) == folder_bytes(corpus.path)


@pytest.mark.parametrize("family", tokenizer_folders.FAMILIES)
def test_every_phrase_of_words_is_cut_into_these_words_again(family: str, tmp_path: Path) -> None:
    """Canaries and references rely on this: text that an attacker types has the same tokens as the planted text."""
    tokenizer = Tokenizer(tokenizer_folders.FAMILIES[family](tmp_path / family))
    words = np.flatnonzero(tokenizer.is_word)
    assert len(words) > 10

    @settings(max_examples=60)
    @given(phrase=st.lists(st.sampled_from(words.tolist()), min_size=1, max_size=8))
    def holds(phrase: list[int]) -> None:
        text = tokenizer.decode(phrase)
        assert tokenizer.encode(text) == phrase
        assert all(word.isalpha() for word in text.split())
        assert len(text.split()) == len(phrase)

    holds()


@pytest.mark.parametrize("family", tokenizer_folders.FAMILIES)
def test_each_family_makes_a_corpus(family: str, tmp_path: Path) -> None:
    """Tokenizers with 1, 3 or 4 special tokens, with or without an unknown token, make a corpus of all their tokens."""
    folder = tokenizer_folders.FAMILIES[family](tmp_path / "tokenizer")
    source = write_jsonl(tmp_path / "a.jsonl", [("a", "The cat saw 12 dogs."), ("a", "The </s> мышь 猫 [SEP].")])
    corpus = import_corpus([source], tmp_path / "corpus", WHOLE, tokenizer=folder)
    tokenizer, tokens, layout = Tokenizer(folder), corpus.token_map, corpus.layout
    assert tokens is not None
    assert tokens.rows == tokenizer.rows
    text = tokens.ids[layout.text_ids.start : layout.text_ids.stop].tolist()
    special = tokens.ids[[layout.pad, layout.oov, layout.bos, layout.eos]].tolist()
    assert sorted([*text, *set(special)]) == list(range(tokenizer.rows))
    assert len(set(special)) == {"gpt2": 1, "llama": 3, "bert": 4}[family]
    records = list(corpus.split("train")[0])
    assert corpus.vocabulary.text(records[0].tolist()).lower() == "the cat saw 12 dogs."
    has_unknown = family != "gpt2"  # GPT-2 has a token for each byte
    assert (layout.oov in np.concatenate(records)) == has_unknown
    assert not {layout.pad, layout.bos, layout.eos} & set(np.concatenate(records).tolist())


def test_canaries_and_references_are_drawn_from_the_same_words(corpus: Corpus) -> None:
    layout = corpus.layout
    canaries = draw_canaries(corpus, CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=40), 0)
    words = range(layout.first_word, layout.last_word + 1)
    drawn = references(0, 2_000, 4, layout)
    assert {token for canary in canaries for token in canary.tokens} <= set(words)
    assert set(drawn.flatten().tolist()) == set(words)
    assert corpus.token_map is not None
    for canary in canaries:
        text = corpus.vocabulary.text(canary.tokens)
        assert corpus.token_map.tokenizer.encode(text) == corpus.token_map.ids[list(canary.tokens)].tolist()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "{}", "has no token for the begin"),
        ("config.json", '{"vocab_size": 300}', "has 330 tokens, but the model of config.json has a vocab_size of 300"),
    ],
)
def test_a_wrong_tokenizer_is_refused_in_one_line(
    name: str, content: str | None, message: str, tmp_path: Path, flsim: Flsim
) -> None:
    folder = tokenizer_folders.gpt2_like(tmp_path / "tokenizer")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    source = write_jsonl(tmp_path / "a.jsonl", posts())
    code, out, err = flsim("data", "import", source, "--tokenizer", folder, "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--train-tokenizer", 200), f"give --train-tokenizer {SMALLEST} or more"),
        (("--train-tokenizer", 50_000, "--words-per-user", 60), "fewer than 50,000"),
        (("--train-tokenizer", 300, "--by", "characters"), "--by: give one of them"),
        (("--train-tokenizer", 300, "--ascii"), "ascii removes characters"),
        (("--layout", "tokenizer"), "layout must be one of tff, fedjax, fedml, found"),
        (("--prompt-column", "ask"), "needs a corpus by tokens"),
        (("--train-tokenizer", 300, "--prompt-column", "ask"), "no 'ask'; its keys"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    options: tuple[object, ...], message: str, tmp_path: Path, flsim: Flsim
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", posts())
    code, out, err = flsim("data", "import", source, "--out", tmp_path / "out", *options)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_rows_without_a_token_have_an_id(tmp_path: Path) -> None:
    """Rows of a model without a token have ids, as in Pythia; here, the model has 10 rows more than 330 tokens."""
    folder = tokenizer_folders.gpt2_like(tmp_path / "tokenizer")
    (folder / "config.json").write_text('{"vocab_size": 340}')
    corpus = import_corpus([write_jsonl(tmp_path / "a.jsonl", posts())], tmp_path / "c", WHOLE, tokenizer=folder)
    assert corpus.token_map is not None
    assert (corpus.token_map.rows, corpus.layout.vocabulary_size) == (340, 343)
    assert corpus.vocabulary.words[-1] == "<row 339>"


def test_a_tokenizer_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tokenizer_folders.gpt2_like(tmp_path / "tokenizer")
    source = write_jsonl(tmp_path / "a.jsonl", posts())

    def write_then_change(*arguments: Any) -> dict[str, int]:
        done = write_users(*arguments)
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text + "\n")
        return done

    monkeypatch.setattr(gather, "write_users", write_then_change)
    with pytest.raises(InputError, match="tokenizer: the file changed while flsim read it"):
        import_corpus([source], tmp_path / "out", HPARAMS, tokenizer=folder)
    assert not (tmp_path / "out").exists()


def test_synthetic_text_has_no_tokenizer() -> None:
    with pytest.raises(InputError, match="synthetic text needs no tokenizer"):
        SyntheticHParams(by="tokens")
    with pytest.raises(InputError, match="synthetic text needs no tokenizer"):
        SyntheticHParams(layout="tokenizer")
