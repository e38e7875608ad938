"""Planting and training in the calling process, without Ray; a state has the content of a checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd

from flsim.algorithms.algorithm import AlgorithmName, SamplerName
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.algorithms.summation import default_branch
from flsim.base.errors import InputError, at_least_one, not_negative
from flsim.base.extensions import refuse_wrong_options
from flsim.base.machine import refuse_missing_device
from flsim.base.settings import Count, Natural, Options, refuse_other, settings
from flsim.canaries.planting import Planting
from flsim.canaries.population import Partition, Population, make_twin, planting_of, roster_of, settled
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus, Shadow
from flsim.models.architectures import ModelHParams, restore
from flsim.privacy.ledger import AuditHParams, PrivacyHParams, spent
from flsim.privacy.sampling import refuse_options
from flsim.runs.config import (
    CentralConfig,
    CentralTrainingHParams,
    Config,
    DataHParams,
    FederatedConfig,
    SystemHParams,
    TrainingHParams,
)
from flsim.training.central import CentralHParams
from flsim.training.own_model import refuse_unfit
from flsim.training.own_model import settled as settled_model
from flsim.training.update import LocalHParams, State
from flsim.training.update import threads as threads_of_torch


@dataclass(frozen=True)
class Planted:
    """The users of a corpus with planted canaries.

    Attributes:
        corpus: the corpus of the users; utility is measured on its test users.
        partition: "non-iid" for the users of the corpus, "iid" for their shuffled twin.
        users: the training users.
        planting: the canaries and the records that they replace, in the order of the corpus.

    Examples:
        >>> users = flsim.plant("corpora/demo", partition="iid")                   # doctest: +SKIP
        >>> len(users), len(users.canaries)                                    # doctest: +SKIP
    """

    corpus: Corpus
    partition: Partition
    users: Population
    planting: Planting = field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def canaries(self) -> tuple[Canary, ...]:
        """Return the canaries, including those that are not planted."""
        return self.planting.canaries

    @property
    def roster(self) -> pd.DataFrame:
        """Return a row per canary, with the columns of `roster.parquet`: its phrase, sharers and insertions."""
        roster = roster_of(self.planting, self.corpus.vocabulary)
        return roster if "is_planted" in roster else roster.assign(is_planted=True)


def plant(
    corpus: Corpus | Path | str,
    canaries: CanaryHParams | None = None,
    *,
    partition: Partition = "non-iid",
    seed: int = 0,
    user_holdout: float = 0.0,
    shadow: Shadow | None = None,
    rounds: int | None = None,
) -> Planted:
    """Plant canaries in the training users of a corpus, in memory; the corpus on disk stays unchanged.

    The same arguments give the canaries of `flsim run` (Thakkar et al., 2020, section 4.1).

    Args:
        corpus: a corpus, or its folder or URI.
        canaries: the canaries to plant; by default the paper's grid, or the canaries that are planted in the corpus.
        partition: "non-iid" for the users of the corpus, "iid" for their shuffled twin.
        seed: seed of phrases, sharers and records, of the twin's order, and of the coins of `shadow`.
        user_holdout: share of each user's records to exclude, see `data.user_holdout`.
        shadow: whether coins exclude users or records, see `data.shadow`; None for no coins.
        rounds: number of rounds of training, for windows of canaries that are fractions of it.

    Raises:
        InputError: the path is not a corpus, the corpus has too few users or words, other canaries are planted in it,
            or a window is a fraction and `rounds` is not set.

    Examples:
        >>> users = flsim.plant("corpora/demo", flsim.Canaries(p_u=[0.01], p_e=[1.0], count=12))   # doctest: +SKIP
    """
    not_negative(seed=seed)
    refuse_other(CanaryHParams | None, "a flsim.Canaries", canaries=canaries)
    opened = corpus if isinstance(corpus, Corpus) else Corpus.open(corpus)
    split = DataHParams(opened.path, partition, user_holdout, shadow).without_withheld(opened.split("train"), seed)
    planting = planting_of(opened, settled(opened, canaries or CanaryHParams()), seed, split, rounds)
    overlay, twin = planting.overlay, None
    if partition == "iid":
        twin, overlay = make_twin(split, planting, seed)
    users = Population.with_canaries(split, planting.canaries, overlay, twin)
    return Planted(opened, partition, users, planting)


def refuse_not_planted(planted: object) -> None:
    """Raise InputError if something else is given in place of users and canaries, such as a corpus."""
    refuse_other(Planted, "what flsim.plant(corpus, ...) returns", planted=planted)


def refuse_impossible(seed: int, threads: int, device: str) -> None:
    """Raise InputError for a seed, a number of threads or a device that is invalid."""
    not_negative(seed=seed)
    at_least_one(threads=threads)
    refuse_missing_device(device)


@settings
class FedAvg:
    """Federated Averaging, or another federated algorithm, with its cohort, local training, server and privacy.

    Attributes:
        cohort: users per round; the expected number if the sampler is "poisson".
        algorithm: "fedavg", "fedprox", "scaffold", or a custom algorithm as ``path/to/file.py:NAME``; see
            docs/algorithms.md.
        sampler: "fixed-size" draws exactly `cohort` users without replacement; "poisson" draws each user independently;
            "with-replacement" draws `cohort` times from all users, and a user that is drawn twice counts twice;
            "round-robin" takes the users in a fixed random order, one cohort after another; "truncated-poisson" is
            "poisson" with at most `limit` users; for the others, see docs/dp.md. A custom sampler is
            ``path/to/file.py:NAME``, see docs/privacy.md.
        local: settings of local training.
        server: the server's optimizer; by default the average update is the step.
        privacy: clip norm and noise; by default neither.
        canary_users: users in addition to those of the corpus, whose updates are random, for `flsim.audit_simulation`;
            by default there are none. They need a clip norm.
        shards: number of contiguous ranges of users whose updates are summed first. In a run, this is `system.shards`;
            equal numbers give equal bits.
        branch: number of consecutive shards whose sums are added before those of branches, see `system.branch`; 0 for
            no branches, and None for the default of a run with this number of shards.
        algorithm_options: options of a custom algorithm: arguments of its class by name, numbers or text.
        sampler_options: options of the sampler; docs/dp.md lists the options of built-in samplers. Options of a custom
            sampler are arguments of its class by name, numbers or text.

    Examples:
        >>> flsim.FedAvg(cohort=40, local=flsim.LocalSGD(learning_rate=0.5))   # doctest: +SKIP
    """

    cohort: Count = 500
    algorithm: AlgorithmName = "fedavg"
    sampler: SamplerName = "fixed-size"
    local: LocalHParams = field(default_factory=LocalHParams)
    server: ServerOptimizerHParams = field(default_factory=ServerOptimizerHParams)
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)
    canary_users: AuditHParams = field(default_factory=AuditHParams)
    shards: Count = 2
    branch: Natural | None = None
    algorithm_options: Options = field(default_factory=dict)
    sampler_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_wrong_options(self, "algorithm")
        refuse_options(self.sampler, self.sampler_options, self.cohort)

    def config(self, planted: Planted, model: ModelHParams, rounds: int, seed: int) -> Config:
        """Return the settings of the run that trains these users; raise InputError if they do not fit each other."""
        training = TrainingHParams(
            **asdict(self.server),
            rounds=rounds,
            cohort=self.cohort,
            algorithm=self.algorithm,
            sampler=self.sampler,
            algorithm_options=self.algorithm_options,
            sampler_options=self.sampler_options,
        )
        branch = default_branch(self.shards) if self.branch is None else self.branch
        return FederatedConfig(
            DataHParams(planted.corpus.path, planted.partition),
            seed,
            model=model,
            privacy=self.privacy,
            training=training,
            local=self.local,
            system=SystemHParams(shards=self.shards, branch=branch),
            audit=self.canary_users,
        )


def epsilon(state: State, delta: float | None = None, conventions: Iterable[str] | None = None) -> dict[str, float]:
    """Return epsilon of (epsilon, delta)-DP of the completed rounds of a state, by the name of a convention.

    Neighbours differ in a user in federated training, and in a record in central training. Conventions are those of
    docs/dp.md; epsilons of different conventions are not comparable.

    Args:
        state: a state of `simulate`, or of a run.
        delta: delta; by default 1 / (10 N) for N users, or records, see `privacy.delta`.
        conventions: names such as "poisson-pld"; by default those that runs report: that of the paper, if it is for the
            sampler, and a sound convention.

    Returns:
        Epsilon by convention; infinite if a round had no noise.

    Raises:
        InputError: the state has no completed round, delta is not between 0 and 1, there is no such convention for the
            sampler, or it cannot account for the rounds.

    Examples:
        >>> flsim.epsilon(state)                                               # doctest: +SKIP
        {'poisson-rdp': 4.61}
        >>> flsim.epsilon(state, delta=1e-5, conventions=["poisson-pld"])      # doctest: +SKIP
        {'poisson-pld': 3.9}
    """
    refuse_other(State, "a state of flsim.simulate", state=state)
    if not state.ledger.entries:
        raise InputError("epsilon: the state has no completed round; train at least one")
    (first, *_) = state.ledger.entries
    chosen = 1 / (10 * first.population) if delta is None else delta
    return spent(state.ledger, first.sampler, chosen, conventions)


@settings
class Central:
    """Central training over records, with SGD, another optimizer, or DP-SGD.

    Attributes:
        training: batches, learning rate and optimizer; a round is a step.
        privacy: clip norm and noise of the records' gradients; by default neither.

    Examples:
        >>> flsim.Central(flsim.CentralSGD(learning_rate=0.5))                 # doctest: +SKIP
    """

    training: CentralHParams = field(default_factory=CentralHParams)
    privacy: PrivacyHParams = field(default_factory=PrivacyHParams)

    def config(self, planted: Planted, model: ModelHParams, rounds: int, seed: int) -> Config:  # noqa: ARG002 (in steps)
        """Return the settings of the run that trains on these users' records."""
        training = CentralTrainingHParams(**asdict(self.training))
        data = DataHParams(planted.corpus.path, planted.partition)
        return CentralConfig(data, seed, model=model, privacy=self.privacy, training=training)


def simulate(
    planted: Planted,
    model: ModelHParams,
    algorithm: FedAvg | Central,
    rounds: int,
    *,
    seed: int = 0,
    start: State | None = None,
    every: int | Callable[[int], bool] = 1,
    device: str = "cpu",
    threads: int = 1,
) -> Iterator[State]:
    """Train in this process, and yield the states after rounds.

    Equal arguments give equal bits on equal machines, and the bits of `flsim run` with the same settings.

    Args:
        planted: the users and their canaries.
        model: the network and its size.
        algorithm: `FedAvg` or `Central`.
        rounds: number of rounds; for central training, the number of steps. Training ends earlier at
            `privacy.max_epsilon`.
        seed: seed of everything that is drawn.
        start: the state to continue from; by default the first state of a new model.
        every: yield a state after every `every` rounds, or after each round for which this function is true. The last
            state is always yielded.
        device: torch device, such as "cuda".
        threads: torch threads during training.

    Yields:
        States after completed rounds, with parameters on the CPU.

    Raises:
        InputError: the settings do not fit the users or each other.
        Diverged: values are not finite, or the loss is implausibly large; the message names the round.

    Examples:
        >>> model, algorithm = flsim.Model(32, 64), flsim.FedAvg(cohort=40)    # doctest: +SKIP
        >>> for state in flsim.simulate(users, model, algorithm, 100, every=50):     # doctest: +SKIP
        ...     print(state.round, len(flsim.evaluate(state, users, model)))
    """
    refuse_not_planted(planted)
    refuse_other(ModelHParams, "a flsim.Model", model=model)
    refuse_other(FedAvg | Central, "a flsim.FedAvg or flsim.Central", algorithm=algorithm)
    at_least_one(rounds=rounds, **{} if callable(every) else {"every": every})
    refuse_impossible(seed, threads, device)
    model = settled_model(model, planted.corpus)
    refuse_unfit(model, planted.corpus.layout, seed, is_new=start is None)
    if start is not None:
        refuse_other(State, "a state of flsim.simulate", start=start)
        if start.round >= rounds:
            raise InputError(f"start has completed {start.round:,} rounds; set rounds above it, found {rounds:,}")
        restore(start.params, model, planted.corpus.layout.vocabulary_size)  # raises if it belongs to another model
    config = algorithm.config(planted, model, rounds, seed)
    units = len(planted.users) if config.unit == "user" else planted.users.records
    asked, rounds = rounds, config.within_budget(rounds, units)
    config.say_end(asked, rounds)
    training = config.training_of(planted.users, rounds, device)
    is_wanted = every if callable(every) else lambda round_: round_ % every == 0
    return _on_threads(training.states(start or training.first_state(), rounds, is_wanted), threads)


def _on_threads(states: Iterator[State], number: int) -> Iterator[State]:
    """Yield the same states, and release torch's threads between them for the caller."""
    while True:
        with threads_of_torch(number):
            state = next(states, None)
        if state is None:
            return
        yield state
