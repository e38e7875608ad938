"""The loop of federated rounds, as in the paper's Algorithm 1: draw a cohort, train it, sum, step.

`flsim run`, `flsim verify`, the benchmarks and `flsim.simulate` share this one loop. They differ in `Send`, which turns
a round's requests into replies, by Flower's messages or in this process.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), Algorithm 1; with
clip and noise, Thakkar et al. (2020), Algorithm 1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flsim.algorithms import fedavg, server_optimizers
from flsim.algorithms.algorithm import Algorithm, train_users, zero_of
from flsim.algorithms.built_in import algorithm_named
from flsim.algorithms.fedavg import FedAvgHParams, ServerStep
from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.summation import Reply, ShardReply, ShardWork, TreeSum
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError
from flsim.base.extensions import configured, custom_call_errors, is_custom
from flsim.data.records import UsersByRound
from flsim.models.architectures import build, class_of
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy import ledger, noise
from flsim.privacy.ledger import Ledger
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.sampling import (
    check_cohort,
    draw_cohort,
    refuse_unaccounted,
    refuse_unrepeatable,
    sampler_class,
    shard_ranges,
)
from flsim.privacy.update_canaries import AuditHParams
from flsim.training.engines import Engine, EngineName, LocalEngine, engine_of, refuse_precision
from flsim.training.hparams import LocalHParams
from flsim.training.optimizers import refuse_failing, refuse_low_precision
from flsim.training.state import Moments, State
from flsim.training.update import UpdateSum, with_canaries


@dataclass(frozen=True)
class RoundRequest:
    """A request to a shard, for one round.

    Attributes:
        round: the round, from 0.
        shard: index of the shard that the users belong to.
        users: int64 [n], this round's cohort within the shard.
        params: the global model's parameters.
        clip: bound on the norm of a user's update in this round; None for no clip.
        sent: the algorithm's own tensors: slot -> parameter -> tensor.
        forget: the oldest round, from 0, that training may go back to; states of users that only older rounds need
            are removed.
    """

    round: int
    shard: int
    users: NDArray[np.int64]
    params: Params
    clip: float | None = None
    sent: Moments = field(default_factory=dict)
    forget: int = 0


Send = Callable[[Sequence[RoundRequest]], Iterable[Reply]]


@dataclass(frozen=True)
class Round:
    """A completed round.

    Attributes:
        state: the state after the round.
        total: the sum over the round's users.
        clip: the bound at which their updates were clipped; None without clip.
        work: the work on each shard with users in the cohort, in shard order.
        step: the size of the server's step.
    """

    state: State
    total: UpdateSum
    clip: float | None
    work: Sequence[ShardWork]
    step: ServerStep


def refuse_injections(algorithm: FedAvgHParams, privacy: PrivacyHParams) -> None:
    """Raise InputError where pseudo-users cannot take part in training."""
    method = algorithm_named(configured(algorithm, "algorithm"))
    if method.user_slots:
        raise InputError(
            f"training.algorithm {method.label}: users keep states between rounds, and pseudo-users of "
            f'canaries.injections have one round; take "fedavg", or plant with canaries.windows'
        )
    if privacy.target_quantile is not None:
        raise InputError(
            "privacy.target_quantile: pseudo-users of canaries.injections would move the adaptive clip; remove it, or "
            "plant with canaries.windows"
        )


@dataclass(frozen=True)
class FederatedTraining:
    """Federated training of a population: its settings, and the loop of rounds.

    Attributes:
        users: the population.
        model: settings of the model.
        algorithm: settings of the server.
        local: settings of local training.
        privacy: the mechanism.
        seed: the experiment's seed; cohorts, batches and noise are functions of (seed, round).
        shards: number of contiguous ranges of users, each of which gets one request a round.
        engine: the engine that trains users in this process; see `flsim.training.engines.engine_of`.
        micro_cohort: number of users that the cohort engine trains at once; None to choose it by the model's size on a
            CPU; on a GPU by the device's memory, once for all processes that share `micro_cohorts`.
        device: torch's name of the device in this process.
        length: number of rounds of the whole training, at whose end a schedule of learning rates ends; None where
            learning rates are constant.
        user_states: the tensors that users keep between rounds, for algorithms that have `user_slots`.
        micro_cohorts: the record of sizes of micro-cohorts, for engines that stack users.
        branch: number of consecutive shards whose sums are added before the sums of branches are; 0 adds all shards in
            one branch. It decides the order of additions (`flsim.algorithms.summation`).
        audit: canary users, who take part beside the population; none by default.

    Raises:
        InputError: the population has no such cohort, there are more shards than users, or the model lacks the
            precision; or a sampler may draw a user twice, where the algorithm or mechanism "dp" does not allow it; or a
            user's own optimizer, sampler or noise fails, or cannot be accounted with mechanism "dp".
    """

    users: UsersByRound
    model: ModelHParams
    algorithm: FedAvgHParams
    local: LocalHParams = field(default_factory=LocalHParams)
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    seed: int = 0
    shards: int = 1
    engine: EngineName = "cohort"
    micro_cohort: int | None = None
    device: str = "cpu"
    length: int | None = None
    user_states: UserStates = field(default_factory=UserStates)
    micro_cohorts: MicroCohorts = field(default_factory=MicroCohorts)
    branch: int = 0
    audit: AuditHParams = field(default_factory=AuditHParams)

    def __post_init__(self) -> None:
        self.audit.refuse_without_clip(self.privacy)
        check_cohort(len(self.users), self.algorithm.cohort, self.sampler)
        shard_ranges(len(self.users), self.shards)
        if self.local.precision != "float32":  # else a user's own file need not be executed to see what it declares
            name = self.model.architecture
            refuse_precision(self.engine, self.local, name, class_of(name).capabilities)
        server_optimizers.refuse_unfit(self.algorithm, self.users.layout.vocabulary_size, self.model)
        optimizer = configured(self.local, "optimizer")
        refuse_failing(optimizer)
        refuse_low_precision(optimizer, self.local.precision)
        method = self.method
        method.refuse(self.local)
        if not method.bounds_users and self.privacy.mechanism != "none":
            raise InputError(
                f"training.algorithm {method.label}: more than a clipped update leaves a user, so that "
                f'privacy.mechanism "{self.privacy.mechanism}" would bound nothing; set it to "none", or take "fedavg"'
            )
        if method.has_own_steps and self.local.precision != "float32":
            raise InputError(f"training.algorithm {method.label} trains in float32; set local.precision to it")
        self._refuse_repeats()
        self._refuse_own_privacy()
        if len(self.users.extra):
            refuse_injections(self.algorithm, self.privacy)

    def _refuse_repeats(self) -> None:
        """Refuse a sampler that may draw a user twice where that cannot be accounted, or users keep states."""
        sampler, method = self.sampler, self.method
        if self.privacy.mechanism == "dp":
            refuse_unaccounted(sampler)
        if method.user_slots and sampler_class(sampler).has_repeats:
            raise InputError(
                f"training.algorithm {method.label}: a user keeps one state a round, and training.sampler {sampler} "
                f'may draw a user twice; set training.sampler to "fixed-size"'
            )

    def _refuse_own_privacy(self) -> None:
        """Try a user's own sampler and noise before training."""
        sampler, privacy, users = self.sampler, self.privacy, len(self.users)
        if is_custom(sampler):
            refuse_unrepeatable(self.seed, users, self.algorithm.cohort, sampler)
        if is_custom(privacy.noise):
            like = build(self.users.layout.vocabulary_size, self.model).trainable
            noise.refuse_unrepeatable(privacy.noise, self.seed, like)
        if privacy.mechanism == "dp" and (is_custom(sampler) or is_custom(privacy.noise)):
            spent = self.algorithm.releases(privacy, users, self.length or self.algorithm.rounds)
            ledger.spent(Ledger((spent,)), spent.sampler, privacy.delta_for(users))

    @property
    def sampler(self) -> str:
        """Return the name of the sampler, with its options."""
        return configured(self.algorithm, "sampler")

    @property
    def method(self) -> Algorithm:
        """Return the algorithm of a round."""
        return algorithm_named(configured(self.algorithm, "algorithm"))

    def first_state(self) -> State:
        """Return the state before the first round."""
        vocabulary_size = self.users.layout.vocabulary_size
        return fedavg.init(vocabulary_size, self.model, self.seed, self.algorithm, self.privacy)

    def cohort(self, round_: int) -> NDArray[np.int64]:
        """Return the users of a round, counted from 0, in ascending order; pseudo-users are the last."""
        drawn = draw_cohort(self.seed, round_, len(self.users), self.algorithm.cohort, self.sampler)
        return np.concatenate([drawn, len(self.users) + self.users.extra.users_in(round_)])

    def requests(self, state: State) -> list[RoundRequest]:
        """Return one request per shard that has users in the cohort of the next round, in shard order.

        Pseudo-users belong to the last shard.
        """
        cohort, sent = self.cohort(state.round), {slot: state.moments[slot] for slot in self.method.slots}
        return [
            RoundRequest(state.round, shard, users, state.params, state.clip, sent)
            for shard, (first, last) in enumerate(shard_ranges(len(self.users), self.shards))
            if len(users := cohort[(first <= cohort) & ((cohort < last) | (shard == self.shards - 1))])
        ]

    def step(self, state: State, total: UpdateSum) -> tuple[State, ServerStep]:
        """Return the state after a round with this sum over its users, and the step; raise `Diverged`."""
        users, size = len(self.users), self.users.layout.vocabulary_size
        total = self._with_canary_users(state, total)
        return fedavg.step(state, total, self.algorithm, self.privacy, self.seed, users, size, self.length)

    def _with_canary_users(self, state: State, total: UpdateSum) -> UpdateSum:
        """Return the sum with the updates of canary users; counts, which steer an adaptive clip, are of real users."""
        if not self.audit.update_canaries or state.clip is None:
            return total
        sampler, size = self.sampler, self.algorithm.cohort
        drawn = self.audit.drawn(self.seed, state.round, len(self.users), size, sampler)
        own = {name: total.delta[name] for name in state.params}
        return replace(total, delta=total.delta | with_canaries(own, drawn, self.seed, state.clip))

    def rounds(self, state: State, until: int, send: Send) -> Iterator[Round]:
        """Train from a state to the end of round `until`; `send` turns requests into replies, in any order."""
        while state.round < until:
            requests = self.requests(state)
            (total, work), clip = self.sum_of(requests, send(requests), state), state.clip
            state, step = self.step(state, total)
            yield Round(state, total, clip, work, step)

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = lambda _: True) -> Iterator[State]:
        """Train in this process; yield the last state, and those after which `is_wanted` of the round is true."""
        for round_ in self.rounds(state, until, self.send_in_process()):
            if round_.state.round == until or is_wanted(round_.state.round):
                yield round_.state

    def send_in_process(self) -> Send:
        """Return a function that trains requested shards in this process, one after another."""
        engine = self.engine_here(self.micro_cohorts.memory_share)

        def send(asked: Sequence[RoundRequest]) -> Iterator[Reply]:
            for request in asked:
                update = self.update(engine, replace(request, forget=request.round))
                yield ShardReply(request.round, request.shard, update)

        return send

    def engine_here(self, memory_share: float = 1.0) -> Engine:
        """Return the engine that trains users on `device`, within a share of the device's memory."""
        layout = self.users.layout
        model = build(layout.vocabulary_size, self.model).to(self.device)
        if self.method.has_own_steps:
            return LocalEngine(model, self.local, self.length)
        engine = engine_of(self.engine, model, layout, self.local, self.micro_cohort, memory_share, self.length)
        # On a CPU the settings decide, and nothing need be recorded.
        self.micro_cohorts.settle(engine, memory_share, self.micro_cohort is not None or self.device == "cpu")
        return engine

    def update(self, engine: Engine, asked: RoundRequest) -> UpdateSum:
        """Return the sum over a request's users, with the records that they have in its round."""
        users = self.users.at(asked.round)
        if not self.method.has_own_steps:
            with self.micro_cohorts.recorded(engine, asked.shard, asked.round):
                return engine.train(asked.params, users, asked.users.tolist(), self.seed, asked.round, asked.clip)
        with custom_call_errors(
            self.algorithm.algorithm, "train(user), which returns a flsim.algorithms.algorithm.Answer"
        ):
            return train_users(
                self.method,
                cast(LocalEngine, engine).model,
                asked.params,
                users,
                asked.users,
                self.local,
                self.seed,
                asked.round,
                self.length,
                asked.sent,
                self.user_states,
                asked.forget,
                asked.clip,
            )

    def sum_of(
        self, requests: Sequence[RoundRequest], replies: Iterable[Reply], state: State
    ) -> tuple[UpdateSum, Sequence[ShardWork]]:
        """Return the sum of a round's replies, and the work on each shard.

        Shards of a branch are added in their order, then branches in theirs, so that the order of replies does not
        matter.

        Raises:
            ValueError: replies are not those of the requests.
        """
        tree = TreeSum((request.shard for request in requests), self.branch)
        for reply in replies:
            tree.add(reply)
        total = tree.total
        return zero_of(self.method, state.params) if total is None else total, tree.work
