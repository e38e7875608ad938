"""Sums of updates over users of a round's cohort, trained again as in the run, which never stores a single update."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flsim.algorithms.rounds import Engine, FederatedTraining
from flsim.algorithms.summation import RoundRequest
from flsim.base.arrays import Ints
from flsim.base.rng import stream
from flsim.canaries.population import Population
from flsim.models.language_model import Params
from flsim.training.local import epoch_orders, local_batches
from flsim.training.state import State
from flsim.training.update import clip_factor, global_norm

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
