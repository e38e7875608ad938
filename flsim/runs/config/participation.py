"""The rounds or steps in which training used a canary, and the records that it read, from (seed, round, population)."""

from collections.abc import Iterable, Iterator

import numpy as np

from flsim.base.arrays import Flags as Flags
from flsim.base.arrays import Ints
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.canaries.population import Population
from flsim.privacy.sampling import draw_cohort, sampler_named
from flsim.training.central.hparams import Order, poisson_lot, positions_at
from flsim.training.update import LocalHParams, epoch_orders

Meetings = tuple[Ints, Ints, Ints]  # round from 1, canary as an index, user; [n] each


def holders(users: Population) -> Ints:
    """Return the user of each planted copy, int64 [n] in the order of `users.overlay`."""
    return np.searchsorted(users.user_offsets, users.overlay.records, side="right") - 1


def of_cohorts(users: Population, seed: int, cohort: int, sampler: str, rounds: int) -> Meetings:
    """Return (round from 1, canary, user), int64 [n] each, for every sharer in every cohort, once if drawn twice."""
    pairs = np.unique(np.stack([holders(users), users.overlay.canaries.astype(np.int64)]), axis=1)
    user, canary = pairs
    present = np.zeros(len(users), bool)
    met = []
    for round_ in tracked("drawing cohorts", range(rounds)):
        members = draw_cohort(seed, round_, len(users), cohort, sampler)
        present[members] = True
        met.append(np.flatnonzero(present[user]))
        present[members] = False
    which = _joined(met)
    return _rounds(met), canary[which], user[which]


def of_steps(users: Population, drawn: Iterable[Ints]) -> tuple[Ints, Ints]:
    """Return (step from 1, copy as an index into `users.overlay`), int64 [n] each, for every copy in `drawn` steps."""
    planted = np.zeros(users.records, bool)
    planted[users.overlay.records] = True
    met = [np.searchsorted(users.overlay.records, positions[planted[positions]]) for positions in drawn]
    return _rounds(met), _joined(met)


def drawn_steps(records: int, seed: int, batch_size: int, order: Order | None, steps: int) -> Iterator[Ints]:
    """Yield the positions of the records of each step: of its batch, or without an order of its lot."""
    for step in tracked("drawing steps", range(steps)):
        if order is None:
            yield poisson_lot(step, records, batch_size, seed)
        else:
            yield positions_at(step, records, batch_size, order, seed)


def of_extra(users: Population, rounds: int, is_by_copy: bool) -> Meetings:
    """Return (round from 1, canary, user), int64 [n] each, for every pseudo-user, or copy, in `rounds` rounds."""
    extra = users.extra
    canary = users.injected[extra.offsets[:-1]] if len(extra) else users.injected
    within = (extra.rounds >= 0) & (extra.rounds < rounds)
    times = np.diff(extra.offsets)[within] if is_by_copy else 1
    once = extra.rounds[within] + 1, canary[within], len(users) + np.flatnonzero(within)
    at, canaries, pseudo_users = (np.repeat(values, times) for values in once)
    return at, canaries, pseudo_users


def read_by_cohorts(users: Population, seed: int, cohort: int, sampler: str, local: LocalHParams, rounds: int) -> Flags:
    """Return whether a user in any cohort read each record, bool [records] in the order of the population."""
    is_read = np.zeros(users.records, bool)
    offsets = users.user_offsets
    for round_ in tracked("drawing cohorts", range(rounds)):
        present = np.unique(draw_cohort(seed, round_, len(users), cohort, sampler))
        started = sampler_named(sampler, cohort).started(seed, round_, len(users), present)
        for user, began in zip(present.tolist(), started.tolist(), strict=True):
            first, end = offsets[user : user + 2].tolist()
            if local.examples(end - first) < end - first:
                chosen = epoch_orders(end - first, local, stream(seed, "local", began, user))[0]
                is_read[first + chosen] = True
            else:
                is_read[first:end] = True
    return is_read


def read_in_steps(users: Population, drawn: Iterable[Ints]) -> Flags:
    """Return whether a step read each record, bool [records] in the order of the population."""
    is_read = np.zeros(users.records, bool)
    for positions in drawn:
        is_read[positions] = True
    return is_read


def _rounds(met: list[Ints]) -> Ints:
    """Return, for each element of the joined lists, the number of its list, from 1."""
    return np.repeat(np.arange(1, len(met) + 1), [len(part) for part in met])


def _joined(parts: Iterable[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])
