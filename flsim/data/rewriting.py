"""Corpora that are derived from another corpus: the same users with a part of their records, or with other records."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flsim.base.arrays import Flags, Ints
from flsim.base.files import new_folder
from flsim.base.progress import progress
from flsim.data.corpus import Corpus, CorpusWriter, Split, SplitWriter
from flsim.data.records import RecordSource

BLOCK = 2**16  # records in memory at a time, or more if a user has more


def rewrite_corpus(
    corpus: Corpus,
    out: Path,
    step: dict[str, Any],
    *,
    source: RecordSource | None = None,
    kept: Flags | None = None,
    dropped: dict[str, int] | None = None,
    notes: Iterable[str] = (),
    beside: Callable[[Path], None] = lambda _: None,
) -> Corpus:
    """Write a corpus with other train records; users (even empty users), other splits and the vocabulary do not change.

    The manifest is the old one with the drops, the notes, and the step, which becomes the last of ``parameters.steps``
    with the digest of the old corpus; its ``label``, if any, names runs over the new corpus. The train records come
    from `source`, of the same number, and only the `kept` [records] are written. `beside` writes further files into the
    new folder, which is not created if there is an error.
    """
    train = corpus.split("train")
    with new_folder(out) as folder, CorpusWriter(folder, corpus.vocabulary, corpus.layout, corpus.splits) as writer:
        for name in corpus.splits:
            split = train if name == "train" else corpus.split(name)
            _copy(source if source and split is train else split, split, kept if split is train else None, writer)
        beside(folder)
        before = corpus.manifest
        drops = dict(before["dropped"])
        for reason, count in (dropped or {}).items():
            drops[reason] = drops.get(reason, 0) + count
        parameters = dict(before["parameters"])
        parameters["read"] = {"records": train.records, **parameters.get("read", {})}
        parameters["steps"] = [*parameters.get("steps", []), {"corpus": corpus.digest, **step}]
        notes = [*before.get("notes", []), *notes]
        writer.finish(drops, before["sources"], parameters, before.get("warnings", []), notes)
    return Corpus.open(out)


def labelled_steps(corpus: Corpus) -> list[dict[str, Any]]:
    """Return the steps with a ``label``, such as defences, which tables name, without what differs between seeds."""
    steps = corpus.manifest["parameters"].get("steps", [])
    of_seed = ("corpus", "seed", "planted")
    common = [{name: value for name, value in step.items() if name not in of_seed} for step in steps]
    return [step for step in common if "label" in step]


def blocks(user_offsets: Ints, size: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of users with about `size` records, by default `BLOCK`, and at least one user each."""
    first, users = 0, len(user_offsets) - 1
    while first < users:
        last = int(np.searchsorted(user_offsets, user_offsets[first] + (size or BLOCK), side="right")) - 1
        last = min(max(last, first + 1), users)
        yield first, last
        first = last


def _copy(source: RecordSource, split: Split, kept: Flags | None, writer: CorpusWriter) -> None:
    into: SplitWriter = writer.splits[split.folder.name]
    user_offsets = np.asarray(split.user_offsets)
    with progress(f"writing {into.folder.name}", split.records, unit="records") as advance:
        for first, last in blocks(user_offsets):
            begin, end = user_offsets[first].item(), user_offsets[last].item()
            positions, owners = np.arange(begin, end), user_offsets[first : last + 1] - begin
            if kept is not None:
                chosen = kept[begin:end]
                positions, owners = positions[chosen], np.concatenate([[0], np.cumsum(chosen)])[owners]
            records = source.records_at(positions)
            lengths = np.diff(records.offsets)
            into.extend(split.names[first:last], records.tokens, lengths, np.diff(owners), records.prompts)
            advance(end)
