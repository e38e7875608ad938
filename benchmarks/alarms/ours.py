"""Simulated truths for the bounds of `flsim.attacks.audit`.

Models without information, and mechanisms with a known epsilon.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, ndtr, ndtri

from benchmarks.alarms.cases import Case, Counts, Flags, Simulate, judged, tossed
from flsim.attacks.audit import bounds
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.rounds import delta_of_cosines
from flsim.base.rng import stream
from flsim.base.statistics import lower_bound, upper_bound
from flsim.privacy.ledger import AuditHParams, Entry, Ledger, cosines
from flsim.training.update import with_canaries

CANARIES = 48
ALIKE, UNLIKE = np.ones(CANARIES, np.int64), np.arange(CANARIES) % 5 + 1
FEW, MANY = (200, 2), (20_000, 20)  # references, and the rank up to which a canary hits
DELTA = 1e-5
USERS, PARAMETERS = 100, 500  # canary users, and parameters of the model
MODELS = 500  # with the record, and as many without


def places_of_canaries(
    rng: np.random.Generator, simulations: int, epsilon: float, share: float, groups: Counts
) -> NDArray[np.float64]:
    """Draw places of canaries among all phrases, from 0 for the most likely one to 1, [simulations, canaries].

    They are e^(g epsilon) times denser in the most likely share. This is randomized response over two sets, the
    strongest epsilon-DP mechanism for a hit.
    """
    weight = expit(groups * epsilon + math.log(share) - math.log1p(-share))
    size = (simulations, len(groups))
    return np.where(rng.random(size) < weight, share * rng.random(size), share + (1 - share) * rng.random(size))


def hits_among_shared_references(
    rng: np.random.Generator,
    simulations: int,
    epsilon: float,
    groups: Counts,
    references: tuple[int, int] = FEW,
    runs: int = 1,
) -> Counts:
    """Draw numbers of canaries that are above the t-th best of R references, [simulations].

    The share of phrases above that reference is random, and the same for all canaries of a run.
    """
    number, threshold = references
    places = places_of_canaries(rng, simulations, epsilon, 2 * threshold / (number + 1), groups)
    beaten = rng.beta(threshold, number - threshold + 1, (simulations, runs)).repeat(len(groups) // runs, axis=1)
    hits: Counts = (places <= beaten).sum(axis=1)
    return hits


def shared_references(epsilon: float, groups: Counts, references: tuple[int, int] = FEW, runs: int = 1) -> Simulate:
    """Return the simulation of canaries among R references, which all canaries of a run share."""
    number, threshold = references

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        hits = hits_among_shared_references(rng, simulations, epsilon, groups, references, runs)
        users = groups.tolist()
        return judged(hits, lambda hit: bounds.epsilon_of_ranks(hit, threshold, number, users) > epsilon)

    return exceeds


def fresh_phrases(epsilon: float) -> Simulate:
    """Return the simulation of canaries that are one of 100 phrases each, whose sets are the most likely three."""

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        hits = (places_of_canaries(rng, simulations, epsilon, 0.03, ALIKE) <= 0.03).sum(axis=1)
        return judged(hits, lambda hit: bounds.epsilon_of_hits(hit, 0.03, ALIKE.tolist()) > epsilon)

    return exceeds


def coins_of_randomized_response(epsilon: float, users: int) -> Simulate:
    """Return the simulation of coins that are revealed with the odds e^(g epsilon); 100 of 200 are guessed."""

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        right = rng.binomial(100, expit(users * epsilon), simulations)
        return judged(right, lambda count: bounds.epsilon_of_coins(200, 100, count, DELTA, users=users) > epsilon)

    return exceeds


def right_guesses(rng: np.random.Generator, simulations: int, mu: float) -> Counts:
    """Draw numbers of right guesses of 20, [simulations]: ten of 100 canaries are guessed at each end.

    Scores are N(0, 1), and N(mu, 1) if the coin is 1.
    """
    planted = tossed(rng, simulations, 100)
    scores = rng.normal(size=planted.shape) + mu * planted
    return np.array([bounds.correct_guesses(*of_run, 10) for of_run in zip(scores, planted, strict=True)])


def coins_of_gaussians(mu: float) -> Simulate:
    """Return the simulation of coins that a Gaussian mechanism hides; its trade-off function is tested."""

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        wrong = bounds.of_one(bounds.gaussian(mu))
        return judged(right_guesses(rng, simulations, mu), lambda right: bounds.is_refuted(wrong, 100, 20, right))

    return exceeds


def coins_of_noise(rng: np.random.Generator, simulations: int) -> Flags:
    """Guess coins from scores without information."""
    right = right_guesses(rng, simulations, 0.0)
    return judged(right, lambda count: bounds.epsilon_of_coins(100, 20, count, DELTA) > 0)


def coins_under_a_ledger(noise: float, users: int) -> Simulate:
    """Return the simulation of a round of all users, whose ledger's curve is tested; g users have one coin."""

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        claim = Claim.of_ledger(Ledger((Entry("poisson", 100, 100, noise, 1),)), "poisson", DELTA)
        wrong = bounds.of_one(bounds.of_group(claim.curve.least_probability, users))
        right = right_guesses(rng, simulations, users / noise)
        return judged(right, lambda count: bounds.is_refuted(wrong, 100, 20, count))

    return exceeds


@cache  # the bounds and the estimate of a noise are compared with the same simulations
def measured_canary_users(noise: float | None, simulations: int) -> tuple[NDArray[np.float64], Flags]:
    """Return cosines and coins of 100 canary users of 500 parameters, both [simulations, 100].

    The change of the model is the sum of the unit vectors of users with coin 1, and noise of a deviation. With the
    noise None it is only noise, as if no update of a canary user were in the sum.
    """
    settings, zero = AuditHParams(USERS, canary_coins=True), {"weights": torch.zeros(PARAMETERS, dtype=torch.float64)}
    angles, coins_of_users = [], []
    for seed in range(simulations):
        present = settings.present(seed)
        total = zero if noise is None else with_canaries(zero, np.flatnonzero(present), seed, 1.0)
        drawn = stream(seed, "noise of canary users", str(noise)).normal(0, noise or 1.0, PARAMETERS)
        angles.append(cosines({"weights": total["weights"] + torch.from_numpy(drawn)}, seed, range(USERS)))
        coins_of_users.append(present)
    return np.array(angles), np.array(coins_of_users)


def right_guesses_of_users(noise: float | None, simulations: int) -> Counts:
    """Return numbers of right guesses of 20 coins of canary users, [simulations]."""
    pairs = zip(*measured_canary_users(noise, simulations), strict=True)
    return np.array([bounds.correct_guesses(*pair, 10) for pair in pairs])


def canary_users_by_coins(noise: float | None) -> Simulate:
    """Return the simulation of the bound of canary users, under a Gaussian mechanism of this noise multiplier."""
    epsilon = epsilon_of_noise(noise)

    def exceeds(_: np.random.Generator, simulations: int) -> Flags:
        right = right_guesses_of_users(noise, simulations)
        return judged(right, lambda count: bounds.epsilon_of_coins(USERS, 20, count, DELTA) > epsilon)

    return exceeds


def canary_users_under_a_ledger(noise: float) -> Simulate:
    """Return the simulation of canary users in a round of all users, whose ledger's curve is tested."""

    def exceeds(_: np.random.Generator, simulations: int) -> Flags:
        claim = Claim.of_ledger(Ledger((Entry("poisson", 100, 100, noise, 1),)), "poisson", DELTA)
        wrong = bounds.of_one(claim.curve.least_probability)
        right = right_guesses_of_users(noise, simulations)
        return judged(right, lambda count: bounds.is_refuted(wrong, USERS, 20, count))

    return exceeds


def estimates_of_canary_users(noise: float | None) -> Simulate:
    """Return the simulation of the estimate of canary users, above an epsilon at which its delta exceeds `DELTA`."""
    epsilon = epsilon_of_noise(noise)

    def exceeds(_: np.random.Generator, simulations: int) -> Flags:
        every = zip(*measured_canary_users(noise, simulations), strict=True)
        members = [angles[present] for angles, present in every]
        deltas = [delta_of_cosines(own.mean(), own.std(ddof=1), PARAMETERS, epsilon) for own in members]
        return np.array(deltas) > DELTA

    return exceeds


def epsilon_of_noise(noise: float | None) -> float:
    """Return the epsilon at `DELTA` of one canary user in or out of a sum with this noise; 0 if it is never in."""
    return 0.0 if noise is None else bounds.epsilon_of_gaussian(1 / noise, DELTA)


def sets_of_gaussians(mu: float) -> Simulate:
    """Return the simulation of canaries of 100 phrases each, at distance mu, whose sets are the most likely five."""
    alternatives, named = 100, 5

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        own = ndtr(rng.normal(size=(simulations, CANARIES)) + mu)
        others = rng.beta(alternatives - named, named, size=own.shape)  # the fifth-largest of 99 uniform numbers
        wrong = bounds.of_set(bounds.gaussian(mu), named / alternatives)
        return judged((own > others).sum(axis=1), lambda hits: bounds.is_refuted(wrong, CANARIES, CANARIES, hits))

    return exceeds


def epsilon_of_gaussian_threshold(
    detected: int, members: int, alarms: int, others: int, delta: float, significance: float = 0.05
) -> float:
    """Return epsilon of mu = Phi^-1(1 - FPR) - Phi^-1(FNR) at the ends of exact intervals: Gaussian mechanisms only."""
    tail = significance / 2
    mu = float(ndtri(1 - upper_bound(alarms, others, tail)) - ndtri(upper_bound(members - detected, members, tail)))
    return bounds.epsilon_of_gaussian(mu, delta) if mu > 0 else 0.0


def models_at_a_threshold(bound: Callable[..., float], detects: float, epsilon: float) -> Simulate:
    """Return the simulation of models with a record and without it, at a threshold.

    Models with the record are above it with probability `detects`, models without it with probability 1 - `detects`.
    """

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        members, others = (rng.binomial(MODELS, rate, simulations).tolist() for rate in (detects, 1 - detects))
        pairs = zip(members, others, strict=True)
        return np.array([bound(hits, MODELS, alarms, MODELS, delta=DELTA) > epsilon for hits, alarms in pairs])

    return exceeds


def all_coins_by_way_of_mu(epsilon: float) -> Simulate:
    """Return the simulation of randomized response, whose 1,000 coins are all guessed, and its epsilon by mu."""

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        right = rng.binomial(1_000, expit(epsilon), simulations)
        wrong = bounds.of_one(bounds.gaussian(mu_of(epsilon)))
        return judged(right, lambda count: bounds.is_refuted(wrong, 1_000, 1_000, count))

    return exceeds


@cache
def mu_of(epsilon: float) -> float:
    """Return mu of the Gaussian mechanism of this epsilon at `DELTA`."""
    return float(brentq(lambda mu: bounds.epsilon_of_gaussian(mu, DELTA) - epsilon, 0.01, 10.0))


def upper_ends(probability: float, trials: int) -> Simulate:
    """Return the simulation of upper bounds of a probability; one below the probability is an alarm."""

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        successes = rng.binomial(trials, probability, simulations)
        return judged(successes, lambda count: upper_bound(count, trials, 0.05) < probability)

    return exceeds


def lower_ends(probability: float, trials: int) -> Simulate:
    """Return the simulation of lower bounds of a probability."""

    def exceeds(rng: np.random.Generator, simulations: int) -> Flags:
        successes = rng.binomial(trials, probability, simulations)
        return judged(successes, lambda count: lower_bound(count, trials, 0.05) > probability)

    return exceeds


def small_p_values(rng: np.random.Generator, simulations: int) -> Flags:
    """Return whether p is at most 5%, of a canary among 20,000 references, for scores without information."""
    own = rng.normal(size=simulations)
    better = rng.binomial(20_000, ndtr(-own))
    return bounds.p_values(1.0 + better, 20_000) <= 0.05


def _named(groups: Counts) -> str:
    return "1 to 5 users a canary" if groups.max() > 1 else "1 user a canary"


def _truth_of(noise: float | None) -> str:
    return "epsilon 0" if noise is None else f"Gaussian, z = {noise:g}"


def _our_bounds() -> Iterator[Case]:
    for epsilon in (0.0, 1.0, 3.0):
        yield Case("guesses.epsilon_of_hits", f"epsilon {epsilon:g}", fresh_phrases(epsilon))
    for groups, references in product((ALIKE, UNLIKE), (FEW, MANY)):
        for epsilon in (0.0, 1.0, 3.0):
            truth = f"epsilon {epsilon:g}, {_named(groups)}, R = {references[0]:,}"
            yield Case("guesses.epsilon_of_ranks", truth, shared_references(epsilon, groups, references))
    for epsilon in (0.0, 3.0):
        pooled = shared_references(epsilon, ALIKE, MANY, runs=4)
        yield Case("guesses.epsilon_of_ranks", f"epsilon {epsilon:g}, 4 runs pooled, R = 20,000", pooled)
    yield Case("coins.epsilon_of_coins", "scores of noise", coins_of_noise)
    for users in (1, 3):
        for epsilon in (0.0, 1.0, 3.0):
            truth = f"epsilon {epsilon:g}, {users} user{'s' * (users > 1)} a canary"
            yield Case("coins.epsilon_of_coins", truth, coins_of_randomized_response(epsilon, users))
    for mu in (0.0, 1.0, 2.0, 4.0):
        yield Case("coins.is_refuted, coins", f"Gaussian, mu {mu:g}", coins_of_gaussians(mu))
    for mu in (0.0, 2.0, 3.0):
        yield Case("coins.is_refuted, sets", f"Gaussian, mu {mu:g}", sets_of_gaussians(mu))
    for noise_of_users in (None, 1.0, 4.0):
        bound, truth = "coins.epsilon_of_coins, canary users", _truth_of(noise_of_users)
        yield Case(bound, truth, canary_users_by_coins(noise_of_users))
    for noise in (1.0, 4.0):
        yield Case("coins.is_refuted, canary users", f"ledger of z = {noise:g}", canary_users_under_a_ledger(noise))
    for noise, users in ((1.0, 1), (2.0, 1), (4.0, 3)):
        truth = f"ledger of z = {noise:g}, {users} user{'s' * (users > 1)} a canary"
        yield Case("coins.is_refuted, a ledger's curve", truth, coins_under_a_ledger(noise, users))
    for epsilon in (0.0, 1.0, 3.0):
        simulate = models_at_a_threshold(bounds.epsilon_of_threshold, float(expit(epsilon)), epsilon)
        yield Case("ranks.epsilon_of_threshold", f"epsilon {epsilon:g}, 1,000 models", simulate)
    for probability, trials in ((0.01, 500), (0.3, 48)):
        truth = f"probability {probability:g}, {trials} trials"
        yield Case("upper_bound", truth, upper_ends(probability, trials))
        yield Case("lower_bound", truth, lower_ends(probability, trials))
    yield Case("ranks.p_values", "p at most 5%, scores of noise", small_p_values)


def _estimates() -> Iterator[Case]:
    bound, by_mu = epsilon_of_gaussian_threshold, "epsilon_of_gaussian_threshold"
    for mu in (0.0, 1.0, 2.0):
        simulate = models_at_a_threshold(bound, float(ndtr(mu / 2)), bounds.epsilon_of_gaussian(mu, DELTA))
        yield Case(by_mu, f"Gaussian, mu {mu:g}", simulate)
    for epsilon in (1.0, 2.0, 3.0):
        truth = f"randomized response, epsilon {epsilon:g}"
        yield Case(by_mu, truth, models_at_a_threshold(bound, float(expit(epsilon)), epsilon), None)
        yield Case("coins.mu_refuted", truth, all_coins_by_way_of_mu(epsilon), None)
    for noise in (None, 1.0, 4.0):
        yield Case("canary_users.epsilon_of_cosines", _truth_of(noise), estimates_of_canary_users(noise), None)


OURS = tuple(_our_bounds())
ESTIMATES = tuple(_estimates())
