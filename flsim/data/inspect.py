"""The contents of a corpus in numbers; lengths are counted piece by piece."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class Distribution:
    """The number of things of each length that occurs, ascending: int64 [distinct] each."""

    values: Ints
    counts: Ints

    @classmethod
    def count(cls, lengths: Iterable[NDArray[Any]]) -> "Distribution":
        """Count all lengths in several arrays, one array in memory at a time."""
        whole = cls(np.empty(0, np.int64), np.empty(0, np.int64))
        for piece in lengths:
            whole += cls(*np.unique(piece, return_counts=True))
        return whole

    def __add__(self, other: "Distribution") -> "Distribution":
        values, place = np.unique(np.concatenate([self.values, other.values]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, other.counts]))
        return Distribution(values, counts)

    def quantiles(self) -> dict[str, int]:
        """Return, by name, the smallest length with at least this share of lengths up to it; empty without things."""
        if not len(self.values):
            return {}
        cumulative = np.cumsum(self.counts)
        ranks = {name: max(1, int(np.ceil(share * cumulative[-1]))) for name, share in QUANTILES.items()}
        return {name: int(self.values[np.searchsorted(cumulative, rank)]) for name, rank in ranks.items()}


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
    measured = {name: _SplitStatistics(corpus.split(name)) for name in corpus.splits}
    splits = {name: _described(split, corpus) for name, split in measured.items()}
    train, manifest = splits["train"], corpus.manifest
    authors, author_warnings = largest_authors(
        (name, user, words)
        for name in SPLITS
        for user, words in zip(measured[name].split.names, measured[name].words_per_user.tolist(), strict=True)
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
        "membership": _membership({name: split.split.names for name, split in measured.items()}),
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


@dataclass(frozen=True)
class _SplitStatistics:
    """The distributions and word counts of one split, each computed in one pass over a file."""

    split: Split

    @cached_property
    def lengths(self) -> dict[str, Distribution]:
        split = self.split
        return {
            "words_per_record": Distribution.count(_steps(split.record_offsets)),
            "records_per_user": Distribution.count(_steps(split.user_offsets)),
            "words_per_user": Distribution.count([self.words_per_user]),
        }

    @cached_property
    def words_per_user(self) -> Ints:
        """Return the number of words of each user, int64 [users]."""
        return np.asarray(np.diff(_taken(self.split.record_offsets, np.asarray(self.split.user_offsets))))

    @cached_property
    def token_counts(self) -> Ints:
        """Return the number of occurrences of each token id, int64 [2^16, or V if V is larger]."""
        counts = np.zeros(max(2**16, self.split.layout.vocabulary_size), np.int64)
        for _, tokens in windows(self.split.tokens):
            counts += np.bincount(tokens, minlength=len(counts))
        return counts


def _steps(offsets: Ints) -> Iterator[Ints]:
    return (np.diff(window) for _, window in windows(offsets, overlap=1))


def _taken(array: Ints, indices: Ints) -> Ints:
    """Return ``array[indices]`` for ascending indices."""
    bounds = (
        (window, start, *np.searchsorted(indices, (start, start + len(window)))) for start, window in windows(array)
    )
    return np.concatenate([window[indices[first:last] - start] for window, start, first, last in bounds])


def _described(measured: _SplitStatistics, corpus: Corpus) -> dict[str, Any]:
    split, layout = measured.split, corpus.layout
    return {
        "users": len(split),
        "records": split.records,
        "words": split.words,
        "prompt_words": None if split.prompts is None else sum(int(part.sum()) for _, part in windows(split.prompts)),
        "oov_share": _share(int(measured.token_counts[layout.oov]), split.words),
        **_coverage(measured.token_counts, layout, corpus),
        **{length: distribution.quantiles() for length, distribution in measured.lengths.items()},
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
