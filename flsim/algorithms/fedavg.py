"""Federated Averaging from top to bottom: draw a cohort, train its users, clip, sum, add noise, step.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), Algorithm 1; with
clip and noise, Thakkar et al. (2020), Algorithm 1. Faster engines are in `flsim.training.cohort`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flsim.algorithms import server_optimizers
from flsim.algorithms.algorithm import (
    FEDAVG,
    Algorithm,
    FedAvgHParams,
    ServerRound,
    Trained,
    User,
    aggregated,
    algorithm_named,
    zero_of,
)
from flsim.algorithms.server_optimizers import ServerStep
from flsim.algorithms.summation import Reply, RoundRequest, ShardWork, TreeSum
from flsim.base.errors import Diverged, RunFailed
from flsim.base.extensions import configured
from flsim.base.rng import stream
from flsim.data.records import Batch, Users, UsersByRound
from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import Params, TrainableModel, loss_sum
from flsim.privacy import noise
from flsim.privacy.ledger import AuditHParams, PrivacyHParams, next_clip, noisy_mean, released, rounded
from flsim.privacy.sampling import Sampler, draw_cohort, sampler_named, shard_ranges
from flsim.training.update import (
    LocalHParams,
    Moments,
    State,
    UpdateSum,
    by_slot,
    flat,
    local_batches,
    restored,
    take_step,
    training_mode,
    with_canaries,
)

if TYPE_CHECKING:  # the reference engine also runs without safetensors
    from flsim.algorithms.user_states import UserStates

MODEL = "model/"  # prefix of the slots of earlier models, which users still train: "model/12" before round 12, from 0
Send = Callable[[Sequence[RoundRequest]], Iterable[Reply]]


@dataclass(frozen=True)
class Round:
    """A completed round: the state after it, the sum over its users, their clip, and the work by shard."""

    state: State
    total: UpdateSum
    clip: float | None
    work: Sequence[ShardWork]
    step: ServerStep


@dataclass(frozen=True)
class FederatedAveraging:
    """The loop of the server, over a state that has everything that the next round needs."""

    users: UsersByRound
    model: ModelHParams
    algorithm: FedAvgHParams
    local: LocalHParams = field(default_factory=LocalHParams)
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    seed: int = 0  # the experiment's seed; cohorts, batches and noise are functions of (seed, round)
    _: KW_ONLY
    length: int | None = None  # number of rounds of the complete training, where a schedule of learning rates ends
    audit: AuditHParams = field(default_factory=AuditHParams)  # canary users, in addition to the population
    shards: int = 1  # number of contiguous ranges of users, each of which gets one request a round
    branch: int = 0  # number of consecutive shards that are summed first (`summation`); 0: all

    def rounds(self, state: State, until: int, send: Send) -> Iterator[Round]:
        """Train from a state to the end of round `until`; `send` trains users, and replies with sums in any order."""
        while state.round < until:
            requests, clip = self.requests(state), state.clip
            totals: list[UpdateSum] = []
            work: list[ShardWork] = []
            for round_ in sorted({request.round for request in requests}) or [state.round]:
                asked = [request for request in requests if request.round == round_]
                sums = TreeSum.of_replies(send(asked), asked, self.branch)
                totals += [stale(sums.total, state.round - round_)] if sums.total else []
                work += sums.work
            total = reduce(UpdateSum.merge, totals) if totals else zero_of(self.method, state.params)
            state, step = self.step(state, total)
            yield Round(state, total, clip, work, step)

    def first_state(self) -> State:
        return init(self.users.layout.vocabulary_size, self.model, self.seed, self.algorithm, self.privacy)

    def cohort(self, round_: int) -> NDArray[np.int64]:
        """Return the users of a round, counted from 0, in ascending order; pseudo-users are the last."""
        cohort = draw_cohort(self.seed, round_, len(self.users), self.algorithm.cohort, self.sampler)
        return np.concatenate([cohort, len(self.users) + self.users.extra.users_in(round_)])

    def requests(self, state: State) -> list[RoundRequest]:
        """Return one request per shard that has users in the cohort of the next round, in shard order.

        Pseudo-users belong to the last shard. With FedBuff, the lists of all rounds in which
        users began are returned, ascending.
        """
        cohort, sent = self.cohort(state.round), {slot: state.moments[slot] for slot in self.method.slots}
        started = self._sampler.started(self.seed, state.round, len(self.users), cohort)
        requests: list[RoundRequest] = []
        for round_ in np.unique(started).tolist():
            began, params = cohort[started == round_], _model_of(state, round_)
            requests += [
                RoundRequest(round_, shard, users, params, state.clip, sent)
                for shard, (first, last) in enumerate(shard_ranges(len(self.users), self.shards))
                if len(users := began[(first <= began) & ((began < last) | (shard == self.shards - 1))])
            ]
        return requests

    def step(self, state: State, total: UpdateSum) -> tuple[State, ServerStep]:
        """Return the state after a round with this sum over its users, and the step; raise `Diverged`."""
        if self.audit.update_canaries and state.clip is not None:
            # Counts, which steer an adaptive clip, are of real users.
            population, size = len(self.users), self.algorithm.cohort
            canaries = self.audit.drawn(self.seed, state.round, population, size, self.sampler)
            updates = {name: total.delta[name] for name in state.params}
            delta = total.delta | with_canaries(updates, canaries, self.seed, state.clip)
            total = replace(total, delta=delta)
        before = {slot: value for slot, value in state.moments.items() if not slot.startswith(MODEL)}
        after, taken = step(
            replace(state, moments=before),
            total,
            self.algorithm,
            self.privacy,
            seed=self.seed,
            population=len(self.users),
            vocabulary_size=self.users.layout.vocabulary_size,
            rounds=self.length,
        )
        pending = self._sampler.pending(self.seed, state.round, len(self.users))
        models = {f"{MODEL}{round_}": _model_of(state, round_) for round_ in pending}
        return replace(after, moments=after.moments | models), taken

    @property
    def sampler(self) -> str:
        return configured(self.algorithm, "sampler")

    @property
    def _sampler(self) -> Sampler:
        return sampler_named(self.sampler, self.algorithm.cohort)

    @property
    def method(self) -> Algorithm:
        return algorithm_named(configured(self.algorithm, "algorithm"))


def _model_of(state: State, round_: int) -> Params:
    """Return the parameters before a round: those of the state, or of an earlier round that users still train."""
    return state.params if round_ == state.round else state.moments[f"{MODEL}{round_}"]


def stale(total: UpdateSum, staleness: int) -> UpdateSum:
    """Return a sum of updates of users who began `staleness` steps before, with weight 1 / sqrt(1 + staleness).

    Xie et al., "Asynchronous Federated Optimization" (2019), as in FLSim, the simulator of the authors of FedBuff.
    """
    if not staleness:
        return total
    return replace(total, delta={name: value / math.sqrt(1 + staleness) for name, value in total.delta.items()})


def init(
    vocabulary_size: int,
    model: ModelHParams,
    seed: int,
    training: FedAvgHParams | None = None,
    privacy: PrivacyHParams | None = None,
) -> State:
    """Return the state before the first round; without settings, the state of plain FedAvg."""
    network = build(vocabulary_size, model).initialize(seed)
    params = {name: value.detach() for name, value in network.trainable.items()}
    server = training or FedAvgHParams()
    moments = server_optimizers.init(params, server) | algorithm_named(configured(server, "algorithm")).init(params)
    if privacy and privacy.mechanism == "dp":
        moments |= noise.init(privacy.process, seed, params)
    return State(0, params, moments, _values(privacy.clip if privacy else None))


def train_users(
    request: RoundRequest,
    users: Users,
    model: TrainableModel,
    hparams: LocalHParams,
    *,
    seed: int,
    rounds: int | None = None,
    algorithm: Algorithm = FEDAVG,
    user_states: "UserStates | None" = None,
    steps: int | None = None,
) -> UpdateSum:
    """Train the users of a request one after another, and return the sum of their answers.

    All engines are tested against it. Updates are weighted by local examples, or clipped, of weight 1. A user without
    records counts with an update of zero. The model's parameters are overwritten. A schedule of the learning rate needs
    `rounds` of the run, an algorithm with `user_slots` needs `user_states`; `steps` is the clip in integer units, if
    users send integers. RunFailed if the tensors of an answer differ from those to be summed.
    """
    model.load(request.params)
    round_, rate = request.round, hparams.rate(request.round, rounds)
    total, states = zero_of(algorithm, request.params), user_states if algorithm.user_slots else None
    for user in request.users.tolist():
        records = users[user]
        batches = list(local_batches(records, users.layout, hparams, stream(seed, "local", round_, user)))
        state = states.read(user, round_) if states else None
        with training_mode(model, seed, round_, user):
            answer = algorithm.train(LocalUser(model, batches, hparams, rate, request.sent, state))
        if states and answer.user_state is not None:
            states.write(user, round_, answer.user_state, request.oldest_resumable_round)
        trained, examples = answer.trained, hparams.examples(len(records))
        part = UpdateSum.of_user(
            trained.delta,
            examples,
            trained.loss,
            trained.tokens,
            clip=request.clip,
            left_out=len(records) - examples,
            weight=None if algorithm.weighs_examples else 1,
        )
        if steps is not None and request.clip is not None:
            part = replace(part, delta=rounded(part.delta, request.clip, steps, seed, round_, user))
        answers = {key: value.to("cpu", torch.float64) for key, value in flat(answer.summed).items()}
        if part.delta.keys() | answers.keys() != total.delta.keys():
            slots = ", ".join(algorithm.answers) or "no slot"
            raise RunFailed(f"{algorithm.label}: a user must answer with a tensor for each parameter of {slots}")
        total = total.merge(replace(part, delta=part.delta | answers))
    return total


class LocalUser(User):
    """ClientUpdate of McMahan et al. (2017) and UserUpdate of Thakkar et al. (2020), with optimizers of torch."""

    def train(self, correction: Params | None = None, proximal: float | None = None) -> Trained:
        start = {name: value.detach().clone() for name, value in self.model.trainable.items()}
        hparams = self.hparams if proximal is None else replace(self.hparams, proximal=proximal)
        loss, tokens = train_user(self.model, self.batches, hparams, self.rate, correction)
        return Trained(restored(self.model, start), len(self.batches), loss, tokens)


def train_user(
    model: TrainableModel,
    batches: Iterable[Batch],
    hparams: LocalHParams,
    rate: float | None = None,
    correction: Params | None = None,
) -> tuple[float, int]:
    """Train the model in place on a user's batches; return the summed cross-entropy, nats, and its positions."""
    parameters: list[Tensor] = list(model.trainable.values())
    anchor = [parameter.detach().clone() for parameter in parameters] if hparams.proximal else []
    optimizer, device = hparams.optimizer_over(parameters, rate), model.device
    total, tokens = 0.0, 0
    for step in batches:
        inputs, targets = torch.from_numpy(step.inputs).to(device), torch.from_numpy(step.targets).to(device)
        loss, count = loss_sum(model, inputs, targets)
        objective = loss / count
        if hparams.proximal:
            away = sum((p - origin).square().sum() for p, origin in zip(parameters, anchor, strict=True))
            objective = objective + hparams.proximal / 2 * away
        gradients = torch.autograd.grad(objective, parameters)
        if correction is not None:
            gradients = tuple(g + correction[name].to(g) for name, g in zip(model.trainable, gradients, strict=True))
        take_step(optimizer, parameters, gradients, hparams.gradient_clip)
        total, tokens = total + loss.item(), tokens + count
    return total, tokens


def step(
    state: State,
    total: UpdateSum,
    hparams: FedAvgHParams,
    privacy: PrivacyHParams,
    *,
    seed: int,
    population: int,
    vocabulary_size: int,
    rounds: int | None = None,
) -> tuple[State, ServerStep]:
    """Average the sum over a round's users, add noise, step, record it in the ledger; return the next state and step.

    Without clip the average is (sum of n_k delta_k) / (sum of n_k), over n_k local examples; without examples the model
    does not change. With clip, at `state.clip`, it is (sum of clipped delta_k) / qN, also for an empty cohort. The
    vocabulary determines the largest plausible loss; `rounds`, by default of the settings, is for a schedule of eta.
    Diverged if updates, loss or parameters are not finite, or the loss is implausibly large.
    """
    culprit = "local.learning_rate" + " or privacy.noise_multiplier" * bool(privacy.noise_multiplier)
    total.refuse_divergence(f"round {state.round + 1}", vocabulary_size, culprit)
    length = hparams.rounds if rounds is None else rounds
    algorithm, clip, counts = algorithm_named(configured(hparams, "algorithm")), state.clip, total.counts
    delta = {key: value for key, value in total.delta.items() if key in state.params}
    answers = by_slot({key: value for key, value in total.delta.items() if key not in delta})
    noises: Params | None = None
    of_noise: Moments = {}
    skellam, wraps = noise.skellam_of(privacy.process, seed, delta), 0
    if skellam is not None and clip is not None:
        integers = skellam.integers(privacy.noise_multiplier, state.round)
        delta, wraps = released(delta, integers, clip, skellam.steps, skellam.bits)
    elif privacy.mechanism == "dp":
        process = hparams.process(privacy, population, length)
        noises, of_noise = noise.step(process, seed, delta, state.moments, state.round)
    mean: Params | None = None
    if clip is not None:
        mean = noisy_mean(delta, clip, privacy, hparams.cohort, noises)
        clip = next_clip(clip, counts.within, counts.users, privacy, hparams.cohort, seed, state.round)
    elif counts.weight:
        mean = {name: 1 / counts.weight * value for name, value in delta.items()}

    of_algorithm = {slot: state.moments[slot] for slot in algorithm.slots}
    others = of_algorithm.keys() | of_noise.keys()
    params, moments = state.params, {slot: value for slot, value in state.moments.items() if slot not in others}
    averaged = mean or {name: torch.zeros_like(value) for name, value in delta.items()}
    round_ = ServerRound(averaged, of_algorithm, answers, counts.users, population, params)
    update, after = aggregated(algorithm, round_)
    if mean is not None:
        mean = update
        rate = hparams.server_rate(state.round, length)
        params, moments = server_optimizers.apply(params, update, moments, hparams, rate)
    moments = moments | after | of_noise
    if not all(bool(torch.isfinite(value).all()) for slot in (params, *moments.values()) for value in slot.values()):
        raise Diverged(
            f"round {state.round + 1}: the averaged model overflows; most likely server_learning_rate is too high"
        )
    ledger = state.ledger.record(hparams.releases(privacy, population, 1, length))
    taken = replace(ServerStep.between(state.params, params, mean), wraps=wraps)
    return State(state.round + 1, params, moments, _values(clip), ledger), taken


def _values(clip: float | None) -> dict[str, float]:
    return {} if clip is None else {"clip": clip}
