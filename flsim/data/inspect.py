"""The contents of a corpus in numbers; lengths are counted piece by piece."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Ints
from flsim.data.authors import author_of, largest_authors
from flsim.data.corpus import Corpus, Split
from flsim.data.manifest import SPLITS, by_in
from flsim.data.records import windows
from flsim.data.vocabulary import Layout

LENGTHS = ("words_per_record", "records_per_user", "words_per_user")
UNITS = ("posts", "records", "words", "users", "rows", "tokens")
TOP = (100, 1_000, 10_000)
_MOST_FREQUENT = 10
QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}


def distribution(lengths: Iterable[NDArray[Any]]) -> dict[int, int]:
    """Return the number of things by length, ascending, of all lengths in several arrays, one in memory at a time."""
    counts = Counter[int]()
    for piece in lengths:
        values, times = np.unique(piece, return_counts=True)
        counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    return dict(sorted(counts.items()))


def quantiles(counts: dict[int, int]) -> dict[str, int]:
    """Return, by name, the smallest length with at least this share of lengths up to it; empty without things."""
    values, cumulative = list(counts), np.cumsum(list(counts.values()))
    ranks = {name: max(1, int(np.ceil(share * cumulative[-1]))) for name, share in QUANTILES.items() if values}
    return {name: values[np.searchsorted(cumulative, rank)] for name, rank in ranks.items()}


def inspect(corpus: Corpus) -> dict[str, Any]:
    """Return a summary of a corpus as JSON-serialisable values; memory grows only with the number of users.

    Returns:
        A dictionary with these keys:

        - ``users``, ``records`` and ``words`` of the train split, which models are trained on; ``heldout_users`` and
          ``test_users``. ``utility``, the split that utility is measured on.
        - ``by``, whether words are words, single characters or tokens; ``layout``, its name; ``vocabulary``, the number
          of token ids, including the four special tokens; ``pieces``, the number of tokens of a tokenizer that are not
          complete words; ``record_words``.
        - ``dropped``, reason -> count of everything that was read and is not in train, heldout or test. The name of the
          reason contains the unit.
        - ``dropped_shares``, reason -> share of everything of that unit that was read (None if not known).
        - ``splits``, see below; ``membership``, see `_membership`.
        - ``authors``, the largest authors of train, heldout and test, and ``author_warnings`` about authors that may
          not be one person; see `flsim.data.authors.largest_authors`.
        - ``sources``, ``parameters``, ``warnings`` and ``notes`` as in the manifest; ``digest`` of the corpus.

        Each split has these keys:

        - ``users``, ``records``, ``words``; ``prompt_words``, those of prompts (None without prompts);
          ``oov_share``, the share of words outside the vocabulary.
        - ``coverage``, the shares of words that the 100, 1,000, 10,000 and all words of the vocabulary cover. The words
          most frequent in the split are taken. Shares are None if there are no words.
        - ``words_occurring``, the number of words of the vocabulary that occur; ``most_frequent``, the ten most
          frequent words with counts.
        - ``words_per_record``, ``records_per_user`` and ``words_per_user``, each as quantile -> number.
    """
    opened = {name: corpus.split(name) for name in corpus.splits}
    words_per_user = {name: _words_per_user(split) for name, split in opened.items()}
    splits = {name: _described(split, words_per_user[name], corpus) for name, split in opened.items()}
    train, manifest = splits["train"], corpus.manifest
    authors, author_warnings = largest_authors(
        (name, user, words)
        for name in SPLITS
        for user, words in zip(opened[name].names, words_per_user[name].tolist(), strict=True)
    )
    dropped = dict(sorted(manifest["dropped"].items()))
    read = manifest["parameters"].get("read", {})
    return {
        "users": train["users"],
        "records": train["records"],
        "words": train["words"],
        "heldout_users": splits["heldout"]["users"],
        "test_users": splits["test"]["users"],
        "utility": corpus.test_users.folder.name,
        "layout": corpus.layout.name,
        "by": by_in(manifest),
        "vocabulary": corpus.layout.vocabulary_size,
        "pieces": corpus.layout.pieces,
        "record_words": corpus.layout.record_words,
        "dropped": dropped,
        "dropped_shares": {reason: _share(count, read.get(unit_of(reason))) for reason, count in dropped.items()},
        "splits": splits,
        "membership": _membership({name: split.names for name, split in opened.items()}),
        "authors": authors,
        "author_warnings": author_warnings,
        "sources": manifest["sources"],
        "parameters": manifest["parameters"],
        "warnings": manifest.get("warnings", []),
        "notes": manifest.get("notes", []),
        "digest": corpus.digest,
    }


def unit_of(reason: str) -> str | None:
    """Return the unit that a reason to drop counts: the first unit in its name."""
    return next((part for part in reason.split("_") if part in UNITS), None)


def _words_per_user(split: Split) -> Ints:
    """Return the number of words of each user, int64 [users]."""
    users = np.asarray(split.user_offsets)
    bounds = (
        (window, start, *np.searchsorted(users, (start, start + len(window))))
        for start, window in windows(split.record_offsets)
    )
    return np.diff(np.concatenate([window[users[first:last] - start] for window, start, first, last in bounds]))


def _described(split: Split, words_per_user: Ints, corpus: Corpus) -> dict[str, Any]:
    layout, lengths = corpus.layout, {"words_per_record": split.record_offsets, "records_per_user": split.user_offsets}
    token_counts = np.zeros(max(2**16, layout.vocabulary_size), np.int64)
    for _, tokens in windows(split.tokens):
        token_counts += np.bincount(tokens, minlength=len(token_counts))
    return {
        "users": len(split),
        "records": split.records,
        "words": split.words,
        "prompt_words": None if split.prompts is None else sum(int(part.sum()) for _, part in windows(split.prompts)),
        "oov_share": _share(int(token_counts[layout.oov]), split.words),
        **_coverage(token_counts, layout, corpus),
        **{
            name: quantiles(distribution(np.diff(window) for _, window in windows(offsets, overlap=1)))
            for name, offsets in lengths.items()
        },
        "words_per_user": quantiles(distribution([words_per_user])),
    }


def _coverage(token_counts: Ints, layout: Layout, corpus: Corpus) -> dict[str, Any]:
    text = layout.text_ids
    counts = token_counts[text.start : text.stop]
    order = np.argsort(-counts, kind="stable")
    covered, total = np.cumsum(counts[order]), int(token_counts.sum())
    tops = {**{str(top): top for top in TOP if top < len(text)}, "all": len(text)}
    frequent = [index for index in order[:_MOST_FREQUENT].tolist() if counts[index]]
    return {
        "coverage": {name: _share(int(covered[top - 1]), total) for name, top in tops.items()},
        "words_occurring": int(np.count_nonzero(counts)),
        "most_frequent": [
            {"word": corpus.vocabulary.text([text.start + index]), "count": int(counts[index])} for index in frequent
        ],
    }


def _membership(names: dict[str, list[str]]) -> dict[str, Any]:
    """Return which authors of heldout and test are members, for attacks on users; an author can be several users.

    ``{split}_authors`` is the number of authors. For all splits except train, ``{split}_also_train`` are the names of
    authors who are in train too, and ``{split}_only`` is the number of those who are not.
    """
    authors = {split: set(map(author_of, users)) for split, users in names.items()}
    membership: dict[str, Any] = {f"{split}_authors": len(members) for split, members in authors.items()}
    for split in authors.keys() - {"train"}:
        membership[f"{split}_also_train"] = sorted(authors[split] & authors["train"])
        membership[f"{split}_only"] = len(authors[split] - authors["train"])
    return membership


def _share(part: int, whole: int | None) -> float | None:
    return part / whole if whole else None
