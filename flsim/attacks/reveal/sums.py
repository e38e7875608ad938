"""Sums of updates over users of a cohort, and whether a record is in a sum."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flsim.algorithms.rounds import Engine, FederatedTraining
from flsim.algorithms.summation import RoundRequest
from flsim.attacks.membership.candidates import gradients_of
from flsim.base.arrays import Floats, Ints
from flsim.base.rng import stream
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.data.withheld import in_whole
from flsim.measures.memorization.random_sampling import references as random_phrases
from flsim.models.language_model import Params, TrainableModel
from flsim.training.local import epoch_orders, local_batches
from flsim.training.update import State, clip_factor, global_norm

PLAIN, CLIPPED, NOISED = "plain", "clipped", "noised"
GROUPS = 5  # largest number of sums of one size


@dataclass(frozen=True)
class CohortSum:
    """The sums over some users of a cohort, and their training data."""

    # by view: the sum of updates, float64 by parameter. "plain" weights updates as training without a clip does;
    # "clipped" sums clipped updates, and is missing without a clip
    updates: dict[str, Params]
    steps: dict[str, float]  # by view: sum over users of the number of local steps times the weight in the sum
    counts: Ints  # int64 [V], number of each token among the targets of all steps
    records: Ints  # int64 [n], records that users trained on, as positions in the order of the population

    def __add__(self, other: "CohortSum") -> "CohortSum":
        return CohortSum(
            {view: {name: value + other.updates[view][name] for name, value in total.items()}
             for view, total in self.updates.items()},
            {view: steps + other.steps[view] for view, steps in self.steps.items()},
            self.counts + other.counts,
            np.concatenate([self.records, other.records]),
        )  # fmt: skip


def requests_of_users(training: FederatedTraining, state: State) -> list[RoundRequest]:
    """Return the requests of a round with one user each, without a clip, in a random order."""
    requests = [
        replace(request, users=request.users[place : place + 1], clip=None, oldest_resumable_round=state.round)
        for request in training.requests(state)
        for place in range(len(request.users))
    ]
    order = stream(training.seed, "order of revealed users", state.round).permutation(len(requests))
    return [requests[place] for place in order]


def sum_of_user(training: FederatedTraining, engine: Engine, state: State, request: RoundRequest) -> CohortSum:
    """Train the user of a request as in the run, and return the user's part of a sum, or raise Diverged."""
    population, (user,) = population_of(training, state), request.users.tolist()
    total = training.update(engine, request)
    total.refuse_divergence(f"round {state.round + 1}", population.layout.vocabulary_size)
    plain, weight = {name: total.delta[name] for name in state.params}, total.counts.weight
    part = data_of_user(training, state, user)
    factors = {PLAIN: 1.0}
    if state.clip is not None:
        per_user = 1 / weight if weight else 0.0
        factors[CLIPPED] = per_user * clip_factor(per_user * global_norm(plain), state.clip)
    return replace(
        part,
        updates={view: {name: factor * value for name, value in plain.items()} for view, factor in factors.items()},
        steps={view: factor * weight * part.steps[PLAIN] for view, factor in factors.items()},
    )


def data_of_user(training: FederatedTraining, state: State, user: int) -> CohortSum:
    """Return the training data of a user in the round after `state`: steps, counts and records, without an update."""
    population, hparams = population_of(training, state), training.local
    records, layout = population[user], population.layout
    keys = training.seed, "local", state.round, user
    targets = [batch.targets.ravel() for batch in local_batches(records, layout, hparams, stream(*keys))]
    counts = np.bincount(np.concatenate([*targets, np.empty(0, np.int64)]), minlength=layout.vocabulary_size)
    counts[layout.pad] = 0
    chosen = epoch_orders(len(records), hparams, stream(*keys))[0]
    return CohortSum({}, {PLAIN: len(targets)}, counts, positions_of(population, user)[chosen])


def positions_of(users: Population, user: int) -> Ints:
    """Return the positions of a user's records in the order of the population; those of pseudo-users follow."""
    if user >= len(users):
        return users.records + users.extra.records_of(np.array([user - len(users)]))
    return np.arange(*users.user_offsets[user : user + 2])


def population_of(training: FederatedTraining, state: State) -> Population:
    """Return the users with their records in the round after `state`."""
    return cast(Population, training.users.at(state.round))  # training of a run


def sums_by_size(parts: Iterable[CohortSum], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], CohortSum]]:
    """Yield ((size, number), sum) for consecutive users, for each size at most `GROUPS` disjoint sums."""
    running, numbers = dict[int, CohortSum](), dict.fromkeys(sizes, 0)
    for users, part in enumerate(parts, 1):
        for size in sizes:
            if numbers[size] == GROUPS:
                continue
            running[size] = running[size] + part if size in running else part
            if users % size == 0:
                yield (size, numbers[size]), running.pop(size)
                numbers[size] += 1


def flattened(tensors: Params) -> Tensor:
    """Return all tensors as one vector [P], float32, in the order of their names."""
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


# Whether a record is in a sum of updates: the alignment of the sum with the record's gradient, and exact p-values.
#
# The score of a record x is the cosine of the sum and -grad loss(x), at the model before the round. K references have
# the distribution of a record that is not in the sum, and are independent of the sum. Therefore
#
#     p = (1 + #{references that score at least as high}) / (K + 1)
#
# is at most alpha with probability at most alpha if the record is not in the sum.
#
# - Records: one random sample, without replacement, has the references and the records that are not in the sum: those
#   of users outside the cohort, except texts that also occur in the cohort.
# - Canaries of random words: references are other random words, exact for a canary that no round has used so far.


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
