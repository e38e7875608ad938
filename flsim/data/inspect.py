"""The contents of a corpus in numbers, and as text for a terminal; lengths are counted piece by piece."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.base.arrays import Ints
from flsim.data.corpus import Corpus, Split
from flsim.data.manifest import SPLITS, WHOLE, by_in
from flsim.data.records import SPECIAL_TOKENS, Layout, author_of, largest_authors, windows

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
          not be one person; see `flsim.data.records.largest_authors`.
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


# The summary of a corpus as plain text for a terminal of 80 columns: tables, and lines of a label and a fact.

WIDTH = 80
_LABEL = 13  # columns
_FEW = 3  # names
Facts = list[tuple[str, str]]
NOTES = {
    "characters": "characters: each word here is a character of the text",
    "tokens": "tokens: each word here is a token of the tokenizer, except that dropped words are words of the text",
}


def describe(summary: dict[str, Any]) -> str:
    parts = [
        _splits(summary),
        *_lengths(summary),
        _text_of(_words(summary)),
        _drops(summary),
        _text_of(_members(summary)),
        _text_of(_origin(summary)),
    ]
    text = "\n\n".join(filter(None, parts))
    printable = "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)
    indent = " " * _LABEL
    lines = (textwrap.wrap(line, WIDTH, subsequent_indent=indent) or [""] for line in printable.split("\n"))
    return "\n".join(line for wrapped in lines for line in wrapped)


def _text_of(facts: Facts) -> str:
    return "\n".join(f"{label:<{_LABEL}}{' '.join(fact.split())}" for label, fact in facts)


def _splits(summary: dict[str, Any]) -> str:
    counts = pd.DataFrame(summary["splits"]).loc[["users", "records", "words"]].T
    members = summary["membership"]
    counts.insert(0, "authors", [members[f"{name}_authors"] for name in counts.index])
    shares = [_percent(split["oov_share"]) for split in summary["splits"].values()]
    shown = counts.map("{:,}".format).assign(OOV=shares).rename_axis(columns="split")
    both = [members.get(f"{name}_also_train") for name in counts.index]
    shown.insert(1, "overlap", ["" if names is None else f"{len(names):,}" for names in both])
    return shown.to_string()


def _lengths(summary: dict[str, Any]) -> Iterator[str]:
    """Yield quantiles of lengths in train, which is balanced, and of complete test authors if the corpus has them."""
    for name in ("train", *({summary["utility"]} & {*WHOLE.values()})):
        if summary["splits"][name]["words_per_user"]:
            lengths = {length.replace("_", " "): summary["splits"][name][length] for length in LENGTHS}
            # A split may have users without records: quantiles of records are then missing.
            quantiles_of = pd.DataFrame(lengths).reindex([*QUANTILES]).fillna(0).astype(int).T
            yield quantiles_of.map("{:,}".format).rename_axis(columns=name).to_string()


def _words(summary: dict[str, Any]) -> Facts:
    train = summary["splits"]["train"]
    words = summary["vocabulary"] - SPECIAL_TOKENS
    whole = f" ({words - summary['pieces']:,} complete words)" if summary["pieces"] else ""
    tokens = f"{summary['vocabulary']:,} token ids in layout {summary['layout']}"
    facts = [
        ("overlap", "authors of the split who are also in train"),
        ("OOV", "share of words out of vocabulary; punctuation counts as words"),
        ("tokens", f"{tokens}; records of at most {summary['record_words']} words"),
        ("vocabulary", f"{words:,} words{whole}, of which {train['words_occurring']:,} occur in train"),
    ]
    if summary["by"] in NOTES:
        facts.append(("by", NOTES[summary["by"]]))
    if train["prompt_words"] is not None:
        share = _percent(train["prompt_words"] / train["words"])
        facts.append(("prompts", f"{share} of train's words are of prompts, which models are not trained to write"))
    if train["words"]:
        tops = [(f"top {int(top):,}" if top.isdecimal() else top, share) for top, share in train["coverage"].items()]
        facts.append(("coverage", f"of train's words: {', '.join(f'{top} {_percent(share)}' for top, share in tops)}"))
        frequent = (word["word"] for word in train["most_frequent"])
        visible = (w.translate({ord(" "): "␣", ord("\n"): "⏎"}) if w.isspace() else w.strip() for w in frequent)
        facts.append(("frequent", " ".join(visible)))
    return facts


def _drops(summary: dict[str, Any]) -> str:
    """Return a line for each reason to drop, by unit, the largest count first, with shares of all that was read."""
    lines = []
    for reason, count in sorted(summary["dropped"].items(), key=lambda item: (unit_of(item[0]) or "", -item[1])):
        if count:
            unit = unit_of(reason) or ""
            things = "authors" if unit == "users" else unit  # they were not cut into users
            why = reason.removeprefix(f"{unit}_").replace("_", " ")  # for example, too short
            lines.append(f"{count:>14,} {things:<8}{_percent(summary['dropped_shares'][reason]):>6}  {why}")
    return "\n".join([f"{'dropped':<{_LABEL}} {'of all read':>15}", *lines]) if lines else ""


def _members(summary: dict[str, Any]) -> Facts:
    """Return warnings about non-members, the split that utility is measured on, and the largest authors."""
    facts, membership = Facts(), summary["membership"]
    if shared := membership["heldout_also_train"]:
        text = f"{len(shared):,} held-out authors are train authors too ({_names(shared)}): they are members"
        facts.append(("WARNING", f"{text}, and attacks must not use them as non-members"))
    elif not membership["heldout_authors"]:
        facts.append(("WARNING", "no author is held out, so attacks on users have no safe non-members"))
    facts.append(("utility", f"measured on split {summary['utility']}; dropped things are counted for balanced users"))
    shares = [f"{_names([author['author']])} {author['share']:.1%}" for author in summary["authors"][:_FEW]]
    return [*facts, ("largest", f"authors by their share of all words: {', '.join(shares)}")]


def _origin(summary: dict[str, Any]) -> Facts:
    sources = [(source["name"], source.get("format", ""), source["bytes"]) for source in summary["sources"]]
    return [
        *(("source", ", ".join(filter(None, (name, format, f"{size:,} bytes")))) for name, format, size in sources),
        *(("note", note) for note in summary["notes"]),
        *(("WARNING", warning) for warning in (*summary["warnings"], *summary["author_warnings"])),
        ("digest", summary["digest"]),
    ]


def _names(names: Sequence[str]) -> str:
    shortened = [name if len(name) <= 24 else f"{name[:21]}..." for name in names[:_FEW]]
    return ", ".join(shortened) + (f" and {len(names) - _FEW:,} more" if len(names) > _FEW else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
