"""The strings of an extraction: training text of a run, and the same amount of other text as controls."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from flsim.attacks.membership.targets import matched, members_of, never_trained
from flsim.base.arrays import Flags, Ints
from flsim.base.rng import stream
from flsim.canaries.spec import Canary
from flsim.data.corpus import Split
from flsim.data.records import Records
from flsim.runs.folder import Run

Places = list[tuple[Split, Ints]]
POOL = 4  # records that are examined per drawn string, because OOV and repetitions exclude some
CANARY = "canary"
RECORD = "record"


@dataclass(frozen=True, eq=False)
class Strings:
    """N strings of one kind; after `prefix` words, which the attacker knows, follows the suffix.

    `names` are such as ``"heldout:17"``. Strings that training did not read (`is_trained` [N]) are controls.
    """

    kind: str
    prefix: int
    texts: Records
    names: Sequence[str]
    is_trained: Flags

    def __len__(self) -> int:
        return len(self.texts)


def canary_strings(canaries: Sequence[Canary], prefix: int, copies: Ints) -> Strings:
    """Return the canaries of more than `prefix` words, complete; canaries without a copy are controls."""
    longer = [index for index, canary in enumerate(canaries) if len(canary.tokens) > prefix]
    texts = Records.from_lists([list(canaries[index].tokens) for index in longer])
    return Strings(CANARY, prefix, texts, [canaries[index].id for index in longer], copies[longer] > 0)


def records_of(run: Run, rounds: int) -> tuple[Places, Places]:
    """Return the records that training read and no canary replaces, and those by authors outside training."""
    held_out, _ = never_trained(run.corpus)  # first, because it checks the corpus before cohorts are drawn
    return [(run.corpus.split("train"), members_of(run, rounds))], held_out


def record_strings(
    seed: int, canaries: Sequence[Canary], sides: tuple[Places, Places], prefix: int, suffix: int, count: int
) -> Strings:
    """Draw at most `count` beginnings of training records, and as many of held-out records, by the seed.

    Strings are distinct, without OOV and canaries, and of equal lengths on both sides.
    """
    rng = stream(seed, "extraction", prefix)
    planted = {canary.tokens for canary in canaries}
    both = [[*_beginnings(places, prefix, suffix, count, planted, rng).items()] for places in sides]
    lengths, lengths_out = (np.array([len(text) for text, _ in side], np.int64) for side in both)
    chosen = matched(lengths, lengths_out, count, rng)
    drawn = [side[index] for side, indices in zip(both, chosen, strict=True) for index in indices.tolist()]
    texts = Records.from_lists([list(text) for text, _ in drawn])
    is_trained = np.arange(len(drawn)) < len(chosen[0])
    return Strings(RECORD, prefix, texts, [name for _, name in drawn], is_trained)


def _beginnings(
    places: Places,
    prefix: int,
    suffix: int,
    count: int,
    planted: Collection[tuple[int, ...]],
    rng: np.random.Generator,
) -> dict[tuple[int, ...], str]:
    """Draw records of more than `prefix` words; return the name of one record for each distinct beginning."""
    names = dict[tuple[int, ...], str]()
    for split, positions in places:
        offsets = np.asarray(split.record_offsets)
        longer = positions[offsets[positions + 1] - offsets[positions] > prefix]
        drawn = rng.permutation(longer)[: POOL * count]
        for position, record in zip(drawn.tolist(), split.records_at(drawn), strict=True):
            words = tuple(record.tolist())
            text = words[: prefix + suffix]
            if split.layout.oov not in text and not any(words[: len(phrase)] == phrase for phrase in planted):
                names.setdefault(text, f"{split.folder.name}:{position}")
    return names
