"""Federated Averaging, plain or private, as (init, apply) over an explicit state: a checkpoint is the state, whole.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), Algorithm 1; with
clip and noise, Thakkar et al. (2020), Algorithm 1.
"""

from dataclasses import dataclass

import torch

from flsim.algorithms import server_optimizers
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import Diverged, at_least_one
from flsim.models.architectures import build
from flsim.models.hparams import ModelHParams
from flsim.privacy.ledger import Entry
from flsim.privacy.mechanism import PrivacyHParams, next_clip, noisy_mean
from flsim.privacy.sampling import Sampler
from flsim.training.divergence import refuse_absurd_loss
from flsim.training.state import State
from flsim.training.update import UpdateSum


@dataclass(frozen=True)
class FedAvgHParams(ServerOptimizerHParams):
    """The server's part, with its optimizer.

    Attributes:
        rounds: number of rounds.
        cohort: users per round; the expected number, where the sampler is "poisson".
        sampler: "fixed-size" draws exactly that many users without replacement, as the paper; "poisson" takes each user
            with probability cohort / N, independently.
    """

    rounds: int = 8_000
    cohort: int = 500
    sampler: Sampler = "fixed-size"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(rounds=self.rounds, cohort=self.cohort)


def init(
    vocabulary_size: int,
    model: ModelHParams,
    seed: int,
    training: FedAvgHParams | None = None,
    privacy: PrivacyHParams | None = None,
) -> State:
    """The state before the first round; by default that of plain FedAvg."""
    network = build(vocabulary_size, model).initialize(seed)
    params = {name: value.detach() for name, value in network.trainable.items()}
    moments = server_optimizers.init(params, training or FedAvgHParams())
    return State(0, params, moments, _values(privacy.clip if privacy else None))


def apply(
    state: State,
    total: UpdateSum,
    hparams: FedAvgHParams,
    privacy: PrivacyHParams,
    seed: int,
    population: int,
    vocabulary_size: int,
    rounds: int | None = None,
) -> State:
    """The next state, from the sum over a round's users: average, noise, step, and the ledger's entry.

    Without clip the average is (sum of n_k delta_k) / (sum of n_k), over n_k local examples; no examples, no change.
    With one it is (sum of clipped delta_k) / qN, also where nobody came.

    Args:
        state: the state before.
        total: over the users of this round, clipped at `state.clip`.
        hparams: the server's part.
        privacy: the mechanism.
        seed: the experiment's; noise is a function of (seed, round).
        population: N, number of training users.
        vocabulary_size: number of token ids, which says what loss is absurd.
        rounds: number of rounds of the run, for a schedule of eta; `hparams.rounds` where None.

    Raises:
        Diverged: a user's update, the loss or the new parameters are not finite, or the loss is absurd: a model that
            blew up without overflowing memorizes nothing, and would pass for a private one.
    """
    _refuse_divergence(state, total, vocabulary_size)
    mean, clip = None, state.clip
    if clip is not None:
        mean = noisy_mean(total.delta, clip, privacy, hparams.cohort, seed, state.round)
        clip = next_clip(clip, total.within, total.users, privacy, hparams.cohort, seed, state.round)
    elif total.weight:
        mean = {name: 1 / total.weight * value for name, value in total.delta.items()}
    params, moments = state.params, state.moments
    if mean is not None:
        rate = hparams.server_rate(state.round, hparams.rounds if rounds is None else rounds)
        params, moments = server_optimizers.apply(params, mean, moments, hparams, rate)
    if not all(bool(torch.isfinite(value).all()) for kept in (params, *moments.values()) for value in kept.values()):
        raise Diverged(
            f"round {state.round + 1}: the averaged model overflows; most likely server_learning_rate is too high"
        )
    spent = Entry(hparams.sampler, population, hparams.cohort, privacy.noise_multiplier, rounds=1)
    return State(state.round + 1, params, moments, _values(clip), state.ledger.record(spent))


def _values(clip: float | None) -> dict[str, float]:
    return {} if clip is None else {"clip": clip}


def _refuse_divergence(state: State, total: UpdateSum, vocabulary_size: int) -> None:
    if not total.is_finite:
        of_users = f" with {total.non_finite:,} of {total.users:,} users" if total.non_finite else ""
        raise Diverged(
            f"round {state.round + 1}: local training gave values that are not finite{of_users}; "
            f"most likely local.learning_rate is too high"
        )
    refuse_absurd_loss(f"round {state.round + 1}", total.loss, total.tokens, vocabulary_size, "local.learning_rate")
