"""The shared part of defences that drop train records: a new corpus without them, and its remaining canaries."""

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
    """Return the train split; raise InputError if it has fewer than `at_least` records, or `out` exists."""
    refuse_existing(out)
    train = corpus.split("train")
    if train.records < at_least:
        raise InputError(
            f"{corpus.path}: has {train.records} train records, but needs {at_least}; import a larger corpus"
        )
    return train


def drop_records(
    corpus: Corpus, out: Path, kept: NDArray[np.bool_], step: dict[str, Any], dropped: dict[str, int]
) -> Corpus:
    """Write the corpus with only the `kept` train records [records], the defence as a step, and counts by reason."""
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
            f"{step['step']}: kept {after.copies:,} of {before.copies:,} canary copies, {after.present:,} of "
            f"{before.present:,} canaries"
        ],
        beside=lambda folder: after.write(folder, corpus.vocabulary),
    )
