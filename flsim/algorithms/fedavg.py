"""Federated Averaging, plain or private, as (init, apply) over an explicit state that a checkpoint holds whole.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), Algorithm 1; with
clip and noise, Thakkar et al. (2020), Algorithm 1.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch

from flsim.algorithms import server_optimizers
from flsim.algorithms.algorithm import ServerRound, split
from flsim.algorithms.built_in import ALGORITHMS, algorithm_named
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import Diverged, RunFailed
from flsim.base.extensions import CustomName, by_content, configured, refuse_wrong_options
from flsim.base.settings import Count, Options, settings
from flsim.models.architectures import build
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy import noise
from flsim.privacy.ledger import Entry
from flsim.privacy.mechanism import PrivacyHParams, next_clip, noisy_mean
from flsim.privacy.sampling import SAMPLERS
from flsim.training.state import Moments, State, refuse_absurd_loss
from flsim.training.update import UpdateSum, global_norm

SamplerName = Annotated[str, CustomName("sampler", SAMPLERS)]
AlgorithmName = Annotated[str, CustomName("algorithm", ALGORITHMS)]


@settings
class FedAvgHParams(ServerOptimizerHParams):
    """Settings of the server, with its optimizer.

    Attributes:
        algorithm: Federated algorithm; see docs/algorithms.md.
        rounds: Number of rounds to train. Unit: rounds.
        cohort: Number of users in each round; with sampler "poisson" the expected number. Unit: users.
        sampler: "fixed-size" draws exactly `cohort` users without replacement, as the paper's Algorithm 1. "poisson"
            takes each of N users with probability cohort / N, independently. "with-replacement" draws `cohort` times
            from all users, as the paper's experiments did by its footnote 1; a user drawn twice counts twice, and
            mechanism "dp" is refused. "round-robin" takes the users in one random order, cohort after cohort, again
            and again; "dp" is refused. Your own: see docs/privacy.md.
        algorithm_options: Options of a custom algorithm, e.g. { alpha = 0.1 }: keyword
            arguments, numbers or text. Unit: none.
        sampler_options: Options of a custom sampler, e.g. { block = 8 }: keyword
            arguments, numbers or text. Unit: none.
    """

    rounds: Count = 8_000
    cohort: Count = 500
    sampler: SamplerName = "fixed-size"
    algorithm: AlgorithmName = "fedavg"
    algorithm_options: Options = field(default_factory=dict)
    sampler_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_wrong_options(self, "algorithm", "sampler")

    def releases(self, privacy: PrivacyHParams, population: int, rounds: int) -> Entry:
        """Return the ledger's entry for a number of rounds over a population of that many users."""
        multiplier, process = privacy.noise_multiplier, by_content(privacy.noise)
        sampler = by_content(configured(self, "sampler"))
        return Entry(sampler, population, self.cohort, multiplier, rounds, process)


def init(
    vocabulary_size: int,
    model: ModelHParams,
    seed: int,
    training: FedAvgHParams | None = None,
    privacy: PrivacyHParams | None = None,
) -> State:
    """Return the state before the first round; without settings that of plain FedAvg."""
    network = build(vocabulary_size, model).initialize(seed)
    params = {name: value.detach() for name, value in network.trainable.items()}
    server = training or FedAvgHParams()
    moments = server_optimizers.init(params, server) | algorithm_named(configured(server, "algorithm")).init(params)
    if privacy and privacy.mechanism == "dp":
        moments |= noise.init(privacy.noise, seed, params)
    return State(0, params, moments, _values(privacy.clip if privacy else None))


@dataclass(frozen=True)
class ServerStep:
    """The server's step of a round, by its size; norms are over all parameters.

    Attributes:
        mean_norm: norm of the update that the server optimizer got, noise included; None if none was averaged.
        step_norm: norm of the change of the model.
        rms: root mean square of the averaged update's entries, to choose the constants of adaptive optimizers from.
    """

    mean_norm: float | None
    step_norm: float
    rms: float | None

    @property
    def ratio(self) -> float | None:
        """Return the effective step: the step's norm over the averaged update's; None where the latter is 0."""
        return self.step_norm / self.mean_norm if self.mean_norm else None


def step(
    state: State,
    total: UpdateSum,
    hparams: FedAvgHParams,
    privacy: PrivacyHParams,
    seed: int,
    population: int,
    vocabulary_size: int,
    rounds: int | None = None,
) -> tuple[State, ServerStep]:
    """Average the sum over a round's users, add noise, step, record it in the ledger; return the next state and step.

    Without clip the average is (sum of n_k delta_k) / (sum of n_k), over n_k local examples; without examples the model
    stays. With clip it is (sum of clipped delta_k) / qN, also for an empty cohort.

    Args:
        state: the state before the round.
        total: the sum over the users of this round, clipped at `state.clip`.
        hparams: settings of the server.
        privacy: the mechanism.
        seed: the experiment's seed; noise is a function of (seed, round).
        population: N, number of training users.
        vocabulary_size: number of token ids, which tells what loss is absurd.
        rounds: number of rounds of the run, for a schedule of eta; `hparams.rounds` where None.

    Raises:
        Diverged: a user's update, the loss or the new parameters are not finite, or the loss is absurd; see
            `flsim.training.state`.
    """
    _refuse_divergence(state, total, vocabulary_size)
    mean, clip, algorithm = None, state.clip, algorithm_named(configured(hparams, "algorithm"))
    delta, summed = split(total.delta, state.params)
    drawn: Params | None = None
    of_noise: Moments = {}
    if privacy.mechanism == "dp":
        drawn, of_noise = noise.step(privacy.noise, seed, delta, state.moments, state.round)
    if clip is not None:
        mean = noisy_mean(delta, clip, privacy, hparams.cohort, drawn)
        clip = next_clip(clip, total.within, total.users, privacy, hparams.cohort, seed, state.round)
    elif total.weight:
        mean = {name: 1 / total.weight * value for name, value in delta.items()}
    own = {slot: state.moments[slot] for slot in algorithm.slots}
    others, params = own.keys() | of_noise.keys(), state.params
    moments = {slot: tensors for slot, tensors in state.moments.items() if slot not in others}
    averaged = mean or {name: torch.zeros_like(value) for name, value in delta.items()}
    update, after = algorithm.aggregate(ServerRound(averaged, own, summed, total.users, population))
    if mean is not None:
        _refuse_other_shapes(algorithm.label, update, mean)
        mean = update
        rate = hparams.server_rate(state.round, hparams.rounds if rounds is None else rounds)
        params, moments = server_optimizers.apply(params, update, moments, hparams, rate)
    moments = moments | after | of_noise
    if not all(bool(torch.isfinite(value).all()) for kept in (params, *moments.values()) for value in kept.values()):
        raise Diverged(
            f"round {state.round + 1}: the averaged model overflows; most likely server_learning_rate is too high"
        )
    ledger = state.ledger.record(hparams.releases(privacy, population, rounds=1))
    return State(state.round + 1, params, moments, _values(clip), ledger), _server_step(state.params, params, mean)


def _refuse_other_shapes(label: str, update: Params, mean: Params) -> None:
    shapes, expected = ({name: value.shape for name, value in tensors.items()} for tensors in (update, mean))
    if shapes != expected:
        raise RunFailed(f"{label}: aggregate must return tensors like the parameters; correct it")


def _server_step(before: Params, after: Params, mean: Params | None) -> ServerStep:
    step_norm = global_norm({name: value.double() - before[name].double() for name, value in after.items()})
    if mean is None:
        return ServerStep(None, step_norm, None)
    mean_norm = global_norm(mean)
    return ServerStep(mean_norm, step_norm, mean_norm / math.sqrt(sum(value.numel() for value in mean.values())))


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
