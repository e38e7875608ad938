"""What all defences that drop train records share: a new corpus without them, and what that left of canaries."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.files import refuse_existing
from flsim.canaries.in_corpus import Planted
from flsim.data.corpus import Corpus, Split
from flsim.data.rewriting import rewrite_corpus


def train_records(corpus: Corpus, out: Path, at_least: int = 1) -> Split:
    """The train split, of at least so many records. Raises InputError where it has fewer, or `out` exists."""
    refuse_existing(out)
    train = corpus.split("train")
    if train.records < at_least:
        raise InputError(f"{corpus.path}: has {train.records} train records, but needs {at_least}; import a larger one")
    return train


def drop_records(
    corpus: Corpus, out: Path, kept: NDArray[np.bool_], step: dict[str, Any], dropped: dict[str, int]
) -> Corpus:
    """Write the corpus without some of its train records; canaries that are planted in it go along.

    Args:
        corpus: the old one.
        out: folder of the new one.
        kept: bool [records], of the train split.
        step: what drops them: name and settings.
        dropped: reason -> count.

    Raises:
        InputError: `out` exists, or what was planted is damaged.
    """
    before = Planted.read(corpus)
    if before is None:
        return rewrite_corpus(corpus, out, step, kept=kept, dropped=dropped)
    after = before.select(kept, np.asarray(corpus.split("train").user_offsets))
    counts = {
        "copies_before": before.copies,
        "copies": after.copies,
        "canaries_before": before.present,
        "canaries": after.present,
    }
    return rewrite_corpus(
        corpus,
        out,
        {**step, "planted": counts},
        kept=kept,
        dropped=dropped,
        notes=[
            f"{step['step']}: left {after.copies:,} of {before.copies:,} canary copies, "
            f"{after.present:,} of {before.present:,} canaries"
        ],
        beside=lambda folder: after.write(folder, corpus.vocabulary),
    )
