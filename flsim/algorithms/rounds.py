"""The loop of rounds, once, as in the paper's Algorithm 1: draw a cohort, train it, sum, step.

`flsim run`, `flsim verify`, the benchmarks and `flsim.simulate` share it. What differs is who trains: `Send` turns a
round's requests into replies, by Flower's messages or in this process.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), Algorithm 1; with
clip and noise, Thakkar et al. (2020), Algorithm 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flsim.algorithms import fedavg, server_optimizers
from flsim.algorithms.algorithm import Algorithm, train_users, zero_of
from flsim.algorithms.built_in import algorithm_named
from flsim.algorithms.fedavg import FedAvgHParams
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError
from flsim.base.extensions import is_own
from flsim.data.records import UsersByRound
from flsim.models.architectures import build, class_of
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy import noise, report
from flsim.privacy.ledger import Ledger
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.sampling import check_cohort, draw_cohort, shard_ranges
from flsim.training.engines import Engine, EngineName, LocalEngine, engine_of, refuse_precision
from flsim.training.hparams import LocalHParams
from flsim.training.optimizers import refuse_failing, refuse_low_precision
from flsim.training.state import Moments, State
from flsim.training.update import UpdateSum


@dataclass(frozen=True)
class RoundRequest:
    """What a shard is asked to do in a round.

    Attributes:
        round: the round, from 0.
        shard: index of the shard that the users belong to.
        users: int64 [n], this round's cohort within the shard.
        params: the global model's parameters.
        clip: bound on the norm of a user's update in this round; None for no clip.
        sent: the algorithm's own tensors: slot -> parameter -> tensor.
        forget: the oldest round, from 0, that training may go back to, for what users keep.
    """

    round: int
    shard: int
    users: NDArray[np.int64]
    params: Params
    clip: float | None = None
    sent: Moments = field(default_factory=dict)
    forget: int = 0


@dataclass(frozen=True)
class ShardReply:
    """What a shard answers.

    Attributes:
        round, shard: as asked.
        update: the sum over its users.
        worker: which process made it.
        seconds: how long that took, without what messages cost.
    """

    round: int
    shard: int
    update: UpdateSum
    worker: str = ""
    seconds: float = 0.0


Send = Callable[[Sequence[RoundRequest]], list[ShardReply]]


@dataclass(frozen=True)
class Round:
    """A completed round.

    Attributes:
        state: after it.
        total: the sum over its users.
        clip: the bound that their updates were clipped at; None without one.
        replies: one per shard with users in the cohort, in shard order.
    """

    state: State
    total: UpdateSum
    clip: float | None
    replies: Sequence[ShardReply]


@dataclass(frozen=True)
class FederatedTraining:
    """Federated training of a population: the settings, and the loop.

    Attributes:
        users: the population.
        model: settings of the model.
        algorithm: the server's part.
        local: what a user does.
        privacy: the mechanism.
        seed: the experiment's; cohorts, batches and noise are functions of (seed, round).
        shards: contiguous ranges of users, each of which is asked and replies once a round.
        engine: what trains the users in this process; see `flsim.training.engines.engine_of`.
        micro_cohort: users that the cohort engine trains at once.
        device: of torch, in this process.
        length: number of rounds of the whole training, at whose end a schedule of learning rates ends; None where rates
            stay.
        user_states: what users keep between rounds, where the algorithm has them keep something.

    Raises:
        InputError: there is no such cohort, there are more shards than users, the model has not the precision, a user's
            own optimizer, sampler or noise fails, or what these release cannot be accounted and should be.
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

    def __post_init__(self) -> None:
        check_cohort(len(self.users), self.algorithm.cohort, self.algorithm.sampler)
        shard_ranges(len(self.users), self.shards)
        if self.local.precision != "float32":  # else a user's own file is not executed to see what it declares
            name = self.model.architecture
            refuse_precision(self.engine, self.local, name, class_of(name).capabilities)
        server_optimizers.refuse_unfit(self.algorithm, self.users.layout.vocabulary_size, self.model)
        refuse_failing(self.local.optimizer)
        refuse_low_precision(self.local.optimizer, self.local.precision)
        method = self.method
        method.refuse(self.local)
        if not method.bounds_users and self.privacy.mechanism != "none":
            raise InputError(
                f"training.algorithm {method.label}: more than a clipped update leaves a user, so that "
                f'privacy.mechanism "{self.privacy.mechanism}" would bound nothing; set it to "none", or take "fedavg"'
            )
        if method.has_own_steps and self.local.precision != "float32":
            raise InputError(f"training.algorithm {method.label} trains in float32; set local.precision to it")
        self._refuse_own_privacy()

    def _refuse_own_privacy(self) -> None:
        """Try a user's own sampler and noise, before anything is trained with them."""
        sampler, privacy, users = self.algorithm.sampler, self.privacy, len(self.users)
        if is_own(sampler):
            draw_cohort(self.seed, 0, users, self.algorithm.cohort, sampler, InputError)
        if is_own(privacy.noise):
            like = build(self.users.layout.vocabulary_size, self.model).trainable
            noise.step(privacy.noise, self.seed, like, noise.init(privacy.noise, self.seed, like), 0, InputError)
        if privacy.mechanism == "dp" and (is_own(sampler) or is_own(privacy.noise)):
            spent = self.algorithm.releases(privacy, users, self.length or self.algorithm.rounds)
            report.spent(Ledger((spent,)), spent.sampler, privacy.delta_for(users))

    @property
    def method(self) -> Algorithm:
        """What a round does."""
        return algorithm_named(self.algorithm.algorithm)

    def first_state(self) -> State:
        """The state before the first round."""
        vocabulary_size = self.users.layout.vocabulary_size
        return fedavg.init(vocabulary_size, self.model, self.seed, self.algorithm, self.privacy)

    def cohort(self, round_: int) -> NDArray[np.int64]:
        """The users of a round, counted from 0, in ascending order."""
        return draw_cohort(self.seed, round_, len(self.users), self.algorithm.cohort, self.algorithm.sampler)

    def requests(self, state: State) -> list[RoundRequest]:
        """One request per shard that has users in the cohort of the next round, in shard order."""
        cohort, sent = self.cohort(state.round), {slot: state.moments[slot] for slot in self.method.slots}
        return [
            RoundRequest(state.round, shard, users, state.params, state.clip, sent)
            for shard, (first, last) in enumerate(shard_ranges(len(self.users), self.shards))
            if len(users := cohort[(first <= cohort) & (cohort < last)])
        ]

    def apply(self, state: State, total: UpdateSum) -> State:
        """The state after a round with this sum over its users. Raises `Diverged` as `fedavg.apply`."""
        users, size = len(self.users), self.users.layout.vocabulary_size
        return fedavg.apply(state, total, self.algorithm, self.privacy, self.seed, users, size, self.length)

    def rounds(self, state: State, until: int, send: Send) -> Iterator[Round]:
        """Train from a state to the end of round `until`; `send` turns requests into replies, in the same order."""
        while state.round < until:
            replies = send(self.requests(state))
            total, clip = self.sum_of([reply.update for reply in replies], state), state.clip
            state = self.apply(state, total)
            yield Round(state, total, clip, replies)

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = lambda _: True) -> Iterator[State]:
        """Train in this process, and hand out the states that are wanted after so many rounds, and the last one."""
        for round_ in self.rounds(state, until, self.here()):
            if round_.state.round == until or is_wanted(round_.state.round):
                yield round_.state

    def here(self) -> Send:
        """Shards are trained in this process, one after another."""
        engine = self.engine_here()

        def send(asked: Sequence[RoundRequest]) -> list[ShardReply]:
            return [
                ShardReply(request.round, request.shard, self.update(engine, replace(request, forget=request.round)))
                for request in asked
            ]

        return send

    def engine_here(self, memory_share: float = 1.0) -> Engine:
        """What trains users on `device`, of whose memory it may fill a share."""
        layout = self.users.layout
        model = build(layout.vocabulary_size, self.model).to(self.device)
        if self.method.has_own_steps:
            return LocalEngine(model, self.local, self.length)
        return engine_of(self.engine, model, layout, self.local, self.micro_cohort, memory_share, self.length)

    def update(self, engine: Engine, asked: RoundRequest) -> UpdateSum:
        """What a shard was asked for: the sum over its users, as they are in that round."""
        users = self.users.at(asked.round)
        if not self.method.has_own_steps:
            return engine.train(asked.params, users, asked.users.tolist(), self.seed, asked.round, asked.clip)
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

    def sum_of(self, updates: Sequence[UpdateSum], state: State) -> UpdateSum:
        """The sum of a round's updates in shard order, so that it does not depend on who replied first."""
        return reduce(UpdateSum.merge, updates) if updates else zero_of(self.method, state.params)
