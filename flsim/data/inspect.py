"""What a corpus holds, as numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.data.corpus import SPLITS, Corpus, Split

QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}
_CHUNK = 2**22  # words or records looked at at once


def inspect(corpus: Corpus) -> dict[str, Any]:
    """Summarize a corpus; everything is JSON-serialisable.

    Returns:
        ``users``, ``records`` and ``words`` of the train split, the one that models see; ``heldout_users`` and
        ``test_users``; ``vocabulary``, the number of token ids, the four special ones included; ``record_words``;
        ``dropped``, reason -> count of everything that was read and is in no split, the reason's name saying what is
        counted; ``splits``, for each split ``users``, ``records``, ``words``, ``oov_share`` (share of words
        outside the vocabulary; None where there are no words), ``records_per_user`` and ``words_per_record``, both as
        quantile -> number; ``sources`` and ``parameters`` as in the manifest; ``digest`` of the whole.
    """
    splits = {name: _split(corpus.split(name)) for name in SPLITS}
    train = splits["train"]
    return {
        "users": train["users"],
        "records": train["records"],
        "words": train["words"],
        "heldout_users": splits["heldout"]["users"],
        "test_users": splits["test"]["users"],
        "vocabulary": corpus.layout.vocabulary_size,
        "record_words": corpus.layout.record_words,
        "dropped": dict(sorted(corpus.manifest["dropped"].items())),
        "splits": splits,
        "sources": corpus.manifest["sources"],
        "parameters": corpus.manifest["parameters"],
        "digest": corpus.digest,
    }


def describe(summary: dict[str, Any]) -> str:
    """What `inspect` returned, for a person with 80 columns."""
    lines = ["split        users      records         words    OOV  records/user  words/record"]
    for name, split in summary["splits"].items():
        oov = "" if split["oov_share"] is None else f"{split['oov_share']:.1%}"
        lengths = (_range(split["records_per_user"]), _range(split["words_per_record"]))
        counts = f"{split['users']:>9,} {split['records']:>12,} {split['words']:>13,}"
        lines.append(f"{name:<8} {counts} {oov:>6} {lengths[0]:>13} {lengths[1]:>13}".rstrip())
    lines += [
        "Ranges are from the 5% to the 95% quantile. Punctuation counts as words.",
        "",
        f"vocabulary   {summary['vocabulary']:,} token ids; records of at most {summary['record_words']} words",
    ]
    lines += [
        f"dropped      {count:,} {reason.replace('_', ' ')}" for reason, count in summary["dropped"].items() if count
    ]
    lines += [f"source       {source['name']}, {source['bytes']:,} bytes" for source in summary["sources"]]
    return "\n".join([*lines, f"digest       {summary['digest']}"])


def _range(quantiles: dict[str, int]) -> str:
    return f"{quantiles['5%']:,}-{quantiles['95%']:,}" if quantiles else ""


def _split(split: Split) -> dict[str, Any]:
    oov_words = sum(
        int(np.count_nonzero(split.tokens[start : start + _CHUNK] == split.layout.oov))
        for start in range(0, split.words, _CHUNK)
    )
    return {
        "users": len(split),
        "records": split.records,
        "words": split.words,
        "oov_share": oov_words / split.words if split.words else None,
        "records_per_user": _quantiles(_histogram(split.user_offsets)),
        "words_per_record": _quantiles(_histogram(split.record_offsets)),
    }


def _histogram(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [longest + 1]: how many of the pieces between offsets have each length; a chunk of offsets at a time."""
    counts = np.zeros(0, np.int64)
    for start in range(0, len(offsets) - 1, _CHUNK):
        found = np.bincount(np.diff(offsets[start : start + _CHUNK + 1]), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def _quantiles(histogram: NDArray[np.int64]) -> dict[str, int]:
    """Each quantile's smallest length that at least this share of the pieces do not exceed; empty without pieces."""
    cumulative = np.cumsum(histogram)
    if not len(cumulative):
        return {}
    ranks = {name: max(1, int(np.ceil(share * cumulative[-1]))) for name, share in QUANTILES.items()}
    return {name: int(np.searchsorted(cumulative, rank)) for name, rank in ranks.items()}
