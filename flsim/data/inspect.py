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
    """What `inspect` returned, for a person: a line a fact."""
    lines = [f"vocabulary  {summary['vocabulary']:,} token ids; records of at most {summary['record_words']} words"]
    for name, split in summary["splits"].items():
        line = f"{name:<11} {split['users']:,} users, {split['records']:,} records, {split['words']:,} words"
        if split["words"]:
            per_user, per_record = split["records_per_user"], split["words_per_record"]
            line += (
                f"; {split['oov_share']:.2%} out of vocabulary; {per_user['5%']} to {per_user['95%']} records a user, "
                f"{per_record['5%']} to {per_record['95%']} words a record (5% to 95%)"
            )
        lines.append(line)
    lines += [
        f"dropped     {count:,} {reason.replace('_', ' ')}" for reason, count in summary["dropped"].items() if count
    ]
    lines += [f"source      {source['name']}, {source['bytes']:,} bytes" for source in summary["sources"]]
    return "\n".join([*lines, f"digest      {summary['digest']}"])


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
