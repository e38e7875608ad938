"""Federated training in runs: checked settings, engines, and shards that train in this process.

`Send` turns a round's requests into replies, with Flower's messages or in this process.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, cast

import numpy as np

from flsim.algorithms import server_optimizers
from flsim.algorithms.algorithm import FedAvgHParams, algorithm_named
from flsim.algorithms.fedavg import FederatedAveraging, Send, train_users
from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.summation import Reply, RoundRequest, ShardReply
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError
from flsim.base.extensions import configured, custom_call_errors, is_custom, short_name
from flsim.base.progress import say
from flsim.data.records import Layout, Users
from flsim.models.architectures import build, class_of, with_low_precision
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import Capabilities, Params, TrainableModel, representative
from flsim.privacy import ledger, noise, sampling
from flsim.privacy.ledger import Ledger, PrivacyHParams, largest_norm
from flsim.training.cohort.engine import BlockTrainer, CohortEngine, is_stacked, users_on_cpu
from flsim.training.cohort.kernels import precision_here
from flsim.training.optimizers import optimizer_named, refuse_failing, refuse_low_precision
from flsim.training.own_model import users_at_once
from flsim.training.update import LocalHParams, State, UpdateSum

EngineName = Literal["cohort", "local"]


class Engine(Protocol):
    """A trainer of users that sums their updates, with the result of `flsim.algorithms.fedavg.train_users`."""

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum: ...


@dataclass(frozen=True)
class LocalEngine:
    """The reference engine, which trains one user after another in plain PyTorch, and overwrites `model`."""

    model: TrainableModel
    hparams: LocalHParams
    rounds: int | None = None

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum:
        request = RoundRequest(round_, 0, np.fromiter(cohort, np.int64), start, clip)
        return train_users(request, users, self.model, self.hparams, seed=seed, rounds=self.rounds)


def engine_of(
    name: EngineName,
    model: TrainableModel,
    layout: Layout,
    hparams: LocalHParams,
    micro_cohort: int | None = None,
    memory_share: float = 1.0,
    rounds: int | None = None,
) -> Engine:
    """Return an engine on the model's device; the last three arguments are those of `CohortEngine`.

    Engine "cohort" needs a model that declares a written-out gradient; to stack users, also one that declares stacking,
    and an optimizer that has a `direction`. Otherwise, and for corpora with prompts, engine "local" is returned, plain
    PyTorch. Without a size of micro-cohorts, small models train on a CPU in micro-cohorts of `users_on_cpu`. Processors
    without bfloat16 train in float32. Raises InputError if settings do not fit.
    """
    able = model.capabilities
    refuse_precision(name, hparams, model.hparams.architecture, able)
    if name == "cohort" and able.blocks:
        at_once = users_at_once(model, hparams, layout, memory_share)
        if at_once > 1 and micro_cohort is not None:
            at_once = micro_cohort
        if at_once == 1 or not isinstance(model, HuggingFaceModel):  # blocks are not faster
            return LocalEngine(model, hparams, rounds)
        trained = {name: value.detach() for name, value in model.trainable.items()}
        trainer = partial(BlockTrainer, model, trained, hparams, layout)
        return CohortEngine(trained, layout, hparams, at_once, memory_share, rounds, trainer=trainer)
    if layout.prompts and hparams.precision != "float32":
        raise InputError('a corpus with prompts needs training in float32; set local.precision = "float32"')
    if name == "cohort" and able.written_out and not layout.prompts:
        refuse_low_precision(configured(hparams, "optimizer"), hparams.precision)
        like = {name: value.detach() for name, value in model.trainable.items()}
        if representative(like).device.type == "cpu":
            hparams = replace(hparams, precision=precision_here(hparams.precision))
        can_stack = able.stacked and optimizer_named(configured(hparams, "optimizer")).direction is not None
        if micro_cohort is None and can_stack:
            micro_cohort = users_on_cpu(like, hparams)
        if can_stack or not is_stacked(like, micro_cohort):
            return CohortEngine(like, layout, hparams, micro_cohort, memory_share, rounds)
        if able.stacked:
            say(f'optimizer "{hparams.optimizer}" has no kernel for stacked users; engine "local" is used instead')
    return LocalEngine(model, hparams, rounds)


def refuse_precision(name: EngineName, hparams: LocalHParams, architecture: str, able: Capabilities | None) -> None:
    """Raise InputError if the model or the engine supports only float32; `able` is None if this is not known yet."""
    if hparams.precision == "float32":
        return
    if able and not (able.low_precision and able.stacked and able.written_out):
        raise InputError(
            f'architecture "{architecture}" trains in float32; local.precision {hparams.precision!r} needs '
            f"{with_low_precision()}"
        )
    if name == "local":
        raise InputError(
            f'system.engine "local" trains in float32; local.precision {hparams.precision!r} needs "cohort"'
        )


def refuse_injections(algorithm: FedAvgHParams, privacy: PrivacyHParams) -> None:
    """Raise InputError if pseudo-users cannot take part in training."""
    if sampling.sampler_class(configured(algorithm, "sampler")).is_asynchronous:
        raise InputError(
            'training.sampler "fedbuff" lets pseudo-users of canaries.injections begin in no round; use another '
            "sampler, or plant with canaries.windows"
        )
    method = algorithm_named(configured(algorithm, "algorithm"))
    if method.user_slots:
        raise InputError(
            f"training.algorithm {method.label}: users keep states between rounds, and pseudo-users of "
            f'canaries.injections have one round; use "fedavg", or plant with canaries.windows'
        )
    if privacy.target_quantile is not None:
        raise InputError(
            "privacy.target_quantile: pseudo-users of canaries.injections would move the adaptive clip; remove it, or "
            "plant with canaries.windows"
        )


@dataclass(frozen=True, kw_only=True)
class FederatedTraining(FederatedAveraging):
    """Federated training of a population: the loop, with checked settings and an engine in this process.

    `micro_cohort` users train at once; None to choose by the model's size, on a GPU by its memory, once for all
    processes that share `micro_cohorts`. InputError if settings do not fit, or a custom optimizer, sampler or noise
    fails.
    """

    engine: EngineName = "cohort"
    micro_cohort: int | None = None
    device: str = "cpu"
    user_states: UserStates = field(default_factory=UserStates)
    micro_cohorts: MicroCohorts = field(default_factory=MicroCohorts)

    def __post_init__(self) -> None:
        self.audit.refuse_without_clip(self.privacy)
        sampling.check_cohort(len(self.users), self.algorithm.cohort, self.sampler)
        sampling.shard_ranges(len(self.users), self.shards)
        if self.local.precision != "float32":  # every model supports float32, so custom code is not executed here
            name = self.model.architecture
            refuse_precision(self.engine, self.local, name, class_of(name).capabilities)
        server_optimizers.refuse_unfit(self.algorithm, self.users.layout.vocabulary_size, self.model)
        optimizer = configured(self.local, "optimizer")
        refuse_failing(optimizer)
        refuse_low_precision(optimizer, self.local.precision)
        method = self.method
        method.refuse(self.local)
        method.refuse_settings(self.model, self.algorithm)
        if not method.bounds_users and self.privacy.mechanism != "none":
            raise InputError(
                f"training.algorithm {method.label}: this algorithm sends more than a clipped update from a user, "
                f'therefore privacy.mechanism "{self.privacy.mechanism}" cannot bound the privacy loss; set '
                'privacy.mechanism to "none", or training.algorithm to "fedavg"'
            )
        if method.has_own_steps and self.local.precision != "float32":
            raise InputError(f"training.algorithm {method.label} trains in float32; set local.precision to float32")
        self._refuse_sampler()
        self._refuse_custom_privacy()
        if len(self.users.extra):
            refuse_injections(self.algorithm, self.privacy)

    def _refuse_sampler(self) -> None:
        """Raise InputError if the algorithm or the accountants do not support the cohorts of the sampler."""
        sampler, method = self.sampler, self.method
        if self.privacy.mechanism == "dp":
            sampling.refuse_unaccounted(sampler)
        if method.user_slots and sampling.sampler_class(sampler).has_repeats:
            raise InputError(
                f"training.algorithm {method.label}: a user keeps one state a round, and training.sampler {sampler} "
                f'may draw a user twice; set training.sampler to "fixed-size"'
            )
        if (method.slots or method.answers or method.user_slots) and sampling.sampler_class(sampler).is_asynchronous:
            raise InputError(
                f"training.algorithm {method.label}: this algorithm has tensors in addition to the model, and "
                f"training.sampler {short_name(sampler)} weighs only updates by staleness; set training.algorithm to "
                '"fedavg"'
            )

    def _refuse_custom_privacy(self) -> None:
        sampler, privacy, users = self.sampler, self.privacy, len(self.users)
        if is_custom(sampler):
            sampling.refuse_unrepeatable(self.seed, users, self.algorithm.cohort, sampler)
        if is_custom(privacy.noise):
            like = build(self.users.layout.vocabulary_size, self.model).trainable
            noise.refuse_unrepeatable(privacy.process, self.seed, like)
        if self._integers:
            if self.audit.update_canaries:
                raise InputError(
                    'privacy.noise "skellam": canary users send real numbers; remove audit.update_canaries'
                )
            self._integers.check(self.privacy.noise_multiplier)
            like = build(self.users.layout.vocabulary_size, self.model).trainable
            largest_norm(self._integers.steps, sum(value.numel() for value in like.values()))
        is_checked = is_custom(sampler) or privacy.noise != "independent"
        if privacy.mechanism == "dp" and is_checked:
            rounds = self.length or self.algorithm.rounds
            spent = self.algorithm.releases(privacy, users, rounds, rounds)
            ledger.spent(Ledger((spent,)), spent.sampler, privacy.delta_for(users))

    @property
    def _integers(self) -> noise.Skellam | None:
        return noise.skellam_of(self.privacy.process, self.seed, {})

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = lambda _: True) -> Iterator[State]:
        """Train in this process; yield the last state, and each state whose round satisfies `is_wanted`."""
        for round_ in self.rounds(state, until, self.send_in_process()):
            if round_.state.round == until or is_wanted(round_.state.round):
                yield round_.state

    def send_in_process(self) -> Send:
        engine = self.engine_here(self.micro_cohorts.memory_share)

        def send(asked: Sequence[RoundRequest]) -> Iterator[Reply]:
            for request in asked:
                update = self.update(engine, replace(request, oldest_resumable_round=request.round))
                yield ShardReply(request.round, request.shard, update)

        return send

    def engine_here(self, memory_share: float = 1.0) -> Engine:
        """Return the engine that trains users on `device`, within a share of the device's memory."""
        layout = self.users.layout
        model = build(layout.vocabulary_size, self.model).to(self.device)
        if self.method.has_own_steps or self._integers:
            return LocalEngine(model, self.local, self.length)
        engine = engine_of(self.engine, model, layout, self.local, self.micro_cohort, memory_share, self.length)
        # On a CPU, the settings determine the size, so no record is needed.
        self.micro_cohorts.settle(engine, memory_share, self.micro_cohort is not None or self.device == "cpu")
        return engine

    def update(self, engine: Engine, request: RoundRequest) -> UpdateSum:
        """Return the sum over a request's users, with the records that they have in its round."""
        users = self.users.at(request.round)
        if not (self.method.has_own_steps or self._integers):
            with self.micro_cohorts.recorded(engine, request.shard, request.round):
                cohort = request.users.tolist()
                return engine.train(request.params, users, cohort, self.seed, request.round, request.clip)
        signature = "train(user), which returns a flsim.algorithms.algorithm.Answer"
        with custom_call_errors(self.algorithm.algorithm, signature):
            return train_users(
                request,
                users,
                cast(LocalEngine, engine).model,
                self.local,
                seed=self.seed,
                rounds=self.length,
                algorithm=self.method,
                user_states=self.user_states,
                steps=self._integers.steps if self._integers else None,
            )
