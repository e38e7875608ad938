"""Whether a record is in a sum of updates: the alignment of the sum with the record's gradient, and exact p-values.

The score of a record x is the cosine of the sum and -grad loss(x), at the model before the round. K references have the
distribution of a record that is not in the sum, and are independent of the sum. Therefore

    p = (1 + #{references that score at least as high}) / (K + 1)

is at most alpha with probability at most alpha if the record is not in the sum.

- Records: one random sample, without replacement, has the references and the records that are not in the sum: those of
  users outside the cohort, except texts that also occur in the cohort.
- Canaries of random words: references are other random words, exact for a canary that no round has used so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flsim.attacks.membership.candidates import gradients_of
from flsim.base.arrays import Floats, Ints
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.data.withheld import in_whole
from flsim.measures.memorization.random_sampling import references as random_phrases
from flsim.models.language_model import TrainableModel

Group = tuple[int, int]  # number of users of a sum, and number of the sum
SAMPLED = 10**6  # records from which those outside the cohort are drawn
RECORD, CANARY = "record", "canary"


@dataclass(frozen=True)
class Texts:
    """N named candidates of one kind, then K references, and which candidates are inside and outside of sums."""

    kind: str
    texts: Records
    names: Sequence[str]
    inside: Mapping[Group, Ints]
    outside: Mapping[Group, Ints]


def record_candidates(
    users: Population, cohort: Ints, sums: Mapping[Group, Ints], count: int, references: int, rng: np.random.Generator
) -> Texts:
    """Draw at most `count` records inside each sum, and as many records and the references of users outside the cohort.

    `sums` has the positions of the records that the users of each sum trained on, int64 [n].
    """
    of_corpus = (
        np.setdiff1d(positions[positions < users.records], users.overlay.records) for positions in sums.values()
    )
    inside = [rng.choice(positions, min(count, len(positions)), replace=False) for positions in of_corpus]
    others = _outside(users, cohort, count + references, rng)
    number = min(count, len(others) // 2)
    every, place = np.unique(np.concatenate([*inside, others[:number]]), return_inverse=True)
    *places, outside = np.split(place, np.cumsum([len(positions) for positions in inside]))
    names = in_whole(users.split, every if users.twin is None else users.twin.order[every])
    return Texts(
        RECORD,
        Records.joined([users.records_at(every), users.records_at(others[number:])]),
        [f"train:{name}" for name in names.tolist()],
        dict(zip(sums, places, strict=True)),
        dict.fromkeys(sums, outside),
    )


def canary_candidates(
    users: Population, canaries: Sequence[Canary], sums: Mapping[Group, Ints], references: int, seed: int
) -> Texts:
    """Return all canaries, whose words are random, with other random words as references; see `record_candidates`."""
    owners = np.concatenate([users.overlay.canaries, users.injected])
    positions = np.concatenate([users.overlay.records, users.records + np.arange(len(users.injected))])
    inside = {group: np.unique(owners[np.isin(positions, of_sum)]).astype(np.int64) for group, of_sum in sums.items()}
    texts = [list(canary.tokens) for canary in canaries]
    drawn = random_phrases(seed, references, len(texts[0]), users.layout).tolist()
    return Texts(
        CANARY,
        Records.from_lists(texts + drawn),
        [canary.id for canary in canaries],
        inside,
        {group: np.setdiff1d(np.arange(len(texts)), of_sum) for group, of_sum in inside.items()},
    )


def alignments(model: TrainableModel, records: Records, layout: Layout, sums: Tensor) -> Floats:
    """Return the cosine of each sum [P, sums] and the negative gradient of each record, float64 [N, sums]."""
    cosines, lengths = np.zeros((len(records), sums.shape[1])), sums.double().norm(dim=0)
    for rows, gradients in gradients_of(model, records, layout):
        flat = torch.cat([gradients[name].flatten(1) for name in sorted(gradients)], dim=1).cpu()
        norms = flat.double().norm(dim=1, keepdim=True) * lengths
        cosines[rows] = (-(flat @ sums).double() / norms).masked_fill(norms == 0, 0.0).numpy()
    return cosines


def _outside(users: Population, cohort: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Draw positions of records of users outside the cohort, whose texts do not occur in the cohort [at most count]."""
    positions = rng.choice(users.records, min(users.records, SAMPLED), replace=False)
    owners = users.user_offsets.searchsorted(positions, side="right") - 1
    positions = positions[~np.isin(owners, cohort) & ~np.isin(positions, users.overlay.records)]
    known = {record.tobytes() for user in np.unique(cohort).tolist() for record in users[user]}
    chosen: list[int] = []
    for position in positions.tolist():
        if len(chosen) == count:
            break
        if users.records_at(np.array([position]))[0].tobytes() not in known:
            chosen.append(position)
    return np.array(chosen, np.int64)
