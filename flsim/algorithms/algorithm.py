"""The contract of a federated algorithm: what the server sends, what a user does, and how the server uses the sum.

A round of any algorithm: the server sends the model, and the tensors of the algorithm, to the cohort. Each user trains
and answers with named tensors; only sums over many users leave a client process. The server averages the sums, steps,
and updates its tensors. `Algorithm` itself is Federated Averaging; subclasses override what differs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import RunFailed
from flsim.data.records import Batch
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params, TrainableModel
from flsim.training.hparams import LocalHParams
from flsim.training.update import Moments, UpdateSum, flat


@dataclass(frozen=True)
class User(ABC):
    """A user in a round, as an algorithm sees it.

    Attributes:
        model: the model, which holds the global parameters; the user trains in it.
        batches: the user's batches in order, one for each step.
        hparams: settings of local training.
        rate: the learning rate of this round.
        sent: tensors of the algorithm that the server sent: slot -> parameter -> tensor.
        user_state: tensors that the user stored in its last round: slot -> parameter -> tensor; None if it never did.
    """

    model: TrainableModel
    batches: Sequence[Batch]
    hparams: LocalHParams
    rate: float
    sent: Moments
    user_state: Moments | None

    @abstractmethod
    def train(self, correction: Params | None = None, proximal: float | None = None) -> "Trained":
        """Take a step for each batch, and restore the model's parameters afterwards.

        Args:
            correction: tensors by parameter name, added to each step's gradient; None for none.
            proximal: weight mu of mu / 2 ||w - w_global||^2 in the loss; None for `local.proximal`.
        """


@dataclass(frozen=True)
class Trained:
    """The result of a user's steps.

    Attributes:
        delta: local model - global model, float64, on the model's device.
        steps: number of steps.
        loss: summed cross-entropy (nats) before each step.
        tokens: number of positions in `loss`.
    """

    delta: Params
    steps: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class Answer:
    """The answer of a user to the server.

    Attributes:
        trained: the user's update of the model.
        summed: for each of `Algorithm.answers` the tensors of `Algorithm.answers_like`, float64.
        user_state: tensors that the user stores until its next round: slot -> parameter -> tensor; None leaves it
            unchanged.
    """

    trained: Trained
    summed: Moments
    user_state: Moments | None = None


@dataclass(frozen=True)
class ServerRound:
    """The data of a round on the server, after the cohort has answered and before the server's step.

    Attributes:
        mean: the averaged update by parameter, float64, after any noise; zeros if no user had an example.
        own: the tensors of the server before the round: slot -> parameter -> tensor.
        summed: the tensors of `Algorithm.answers`, summed over the cohort; float64.
        users: number of users in the cohort.
        population: N, number of training users.
        params: the parameters before the round.
    """

    mean: Params
    own: Moments
    summed: Moments
    users: int
    population: int
    params: Params


class Algorithm:
    """Federated Averaging: McMahan et al. (2017), Algorithm 1. Subclasses override what differs.

    `algorithm_options` are arguments of the constructor. An object has no other state: the tensors of the server are in
    `flsim.training.update.State`, and those of users in files of the run folder. Therefore a run resumes to the same
    bits, and any process can serve any user.

    Attributes:
        label: the algorithm's name in messages and tables; tables name a custom algorithm NAME.
        slots: names of the tensors of the server, which are sent to users; for each slot one float32 tensor per
            parameter.
        answers: names of tensors that are summed over the cohort in addition to the updates; one tensor per parameter,
            unless `answers_like` is overridden.
        user_slots: names of the tensors that a user stores between rounds; one float32 tensor per parameter.
        weighs_examples: whether updates are weighted by users' numbers of examples; otherwise all weights are equal.
        bounds_users: whether a user's update of the model is all that leaves the user, so that clip and noise bound the
            information about a user. If false, settings with clip or noise are refused.
        has_own_steps: whether `train` is overridden; otherwise any engine may train users.
    """

    label: ClassVar[str] = "FedAvg"
    slots: ClassVar[tuple[str, ...]] = ()
    answers: ClassVar[tuple[str, ...]] = ()
    user_slots: ClassVar[tuple[str, ...]] = ()
    weighs_examples: ClassVar[bool] = True
    bounds_users: ClassVar[bool] = True

    @property
    def has_own_steps(self) -> bool:
        """Return whether `train` is overridden; otherwise any engine may train users."""
        return type(self).train is not Algorithm.train

    def refuse(self, local: LocalHParams) -> None:
        """Raise InputError if the settings of local training do not fit the algorithm."""

    def refuse_settings(self, model: ModelHParams, server: ServerOptimizerHParams) -> None:
        """Raise InputError if the settings of the model or of the server optimizer do not fit the algorithm."""

    def answers_like(self, params: Params) -> Moments:
        """Return tensors with the names and shapes of `answers`; those of the parameters unless overridden."""
        return dict.fromkeys(self.answers, params)

    def init(self, params: Params) -> Moments:
        """Return the tensors of the server before the first round; zeros unless overridden."""
        return {slot: {name: value.new_zeros(value.shape) for name, value in params.items()} for slot in self.slots}

    def train(self, user: User) -> Answer:
        return Answer(user.train(), {})

    def step(self, own: Moments, summed: Moments, users: int, population: int) -> Moments:  # noqa: ARG002 (for others)
        """Return the tensors of the server after a round; for the arguments, see `ServerRound`."""
        return own

    def aggregate(self, round_: ServerRound) -> tuple[Params, Moments]:
        """Return the update that the server optimizer steps along, and the tensors of the server after the round.

        By default, the averaged update and the result of `step`. A round without examples does not change the model.
        """
        return round_.mean, self.step(round_.own, round_.summed, round_.users, round_.population)


FEDAVG = Algorithm()


def aggregated(algorithm: Algorithm, round_: ServerRound) -> tuple[Params, Moments]:
    """Return the result of `Algorithm.aggregate`; raise RunFailed if names or shapes are wrong."""
    update, after = algorithm.aggregate(round_)
    shapes, expected = ({name: value.shape for name, value in tensors.items()} for tensors in (update, round_.mean))
    if shapes != expected:
        raise RunFailed(
            f"{algorithm.label}: aggregate must return tensors with the names and shapes of the parameters; correct it"
        )
    return update, after


def zero_of(algorithm: Algorithm, like: Params) -> UpdateSum:
    """Return the sum over zero users, with all tensors of the algorithm's answers."""
    return UpdateSum.zero(like | flat(algorithm.answers_like(like)))
