"""The interface of federated algorithms, the built-in algorithms, and the settings of the server.

A round of any algorithm: the server sends the model, and the tensors of the algorithm, to the cohort. Each user trains
and answers with named tensors; only sums over many users leave a client process. The server averages the sums, steps,
and updates its tensors. `Algorithm` itself is Federated Averaging; subclasses override what differs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base import extensions
from flsim.base.errors import InputError, RunFailed
from flsim.base.settings import Count, Options, settings
from flsim.data.records import Batch
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params, TrainableModel
from flsim.privacy.ledger import Entry, PrivacyHParams
from flsim.privacy.noise import settled
from flsim.privacy.sampling import SAMPLERS, Sampling, refuse_options
from flsim.training.update import LocalHParams, Moments, UpdateSum, flat, threads


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


# The built-in federated algorithms.


class Scaffold(Algorithm):
    """Federated Averaging with control variates: c of the server and c_i of each user, all zeros at first.

    Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning" (2020), Algorithm 1, with option II for the users' control variates. A user takes steps y <- y - eta_l
    (g_i(y) - c_i + c), then sets c_i+ = c_i - c + (x - y) / (K eta_l), and answers with y - x and c_i+ - c_i. The
    server steps along the plain mean of the first, with its own optimizer, and adds the sum of the second, divided by
    N, to c. A user without records changes nothing, and neither does a user at a learning rate of 0.
    """

    label = "SCAFFOLD"
    slots = ("control",)
    answers = ("control",)
    user_slots = ("control",)
    weighs_examples = False
    bounds_users = False  # c_i+ - c_i leaves a user as well, and no clip bounds it

    def refuse(self, local: LocalHParams) -> None:
        """Raise InputError unless local steps are plain SGD, whose learning rate the control variates contain."""
        for name, is_plain in (
            ("optimizer", local.optimizer == "sgd"),
            ("gradient_clip", local.gradient_clip is None),
            ("proximal", not local.proximal),
        ):
            if not is_plain:
                raise InputError(f"training.algorithm SCAFFOLD corrects steps of plain SGD; remove local.{name}")

    def train(self, user: User) -> Answer:
        c = user.sent["control"]
        zeros = {name: value.new_zeros(value.shape) for name, value in c.items()}
        c_i = user.user_state["control"] if user.user_state else zeros
        trained = user.train({name: c[name] - c_i[name] for name in c})
        k_eta = trained.steps * user.rate
        if not k_eta:  # no steps, or a schedule's rate of 0: (x - y) / (K eta_l) is 0 / 0
            return Answer(trained, {"control": {name: value.double() * 0 for name, value in c.items()}})
        after = {name: (c_i[name] - c[name] - trained.delta[name].cpu() / k_eta).float() for name in c}
        change = {name: after[name].double() - c_i[name].double() for name in c}
        return Answer(trained, {"control": change}, {"control": after})

    def step(self, own: Moments, summed: Moments, users: int, population: int) -> Moments:  # noqa: ARG002 (N divides)
        """Return c + |S| / N times the mean of c_i+ - c_i, lines 16 and 17."""
        c = own["control"]
        return {"control": {name: (c[name].double() + summed["control"][name] / population).float() for name in c}}


class FedProx(Algorithm):
    """Federated Averaging whose users minimize their loss + mu / 2 ||w - w_global||^2, with mu `local.proximal`.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks" (2020), Algorithm
    2 and equation 2.
    """

    label = "FedProx"

    def refuse(self, local: LocalHParams) -> None:
        if not local.proximal:
            raise InputError('training.algorithm "fedprox" needs mu; set local.proximal above 0')


class FlexLoRA(Algorithm):
    """Federated Averaging whose next B A is the matrix of rank r nearest to the mean of the users' products B_k A_k.

    Bai, Chen, Qian, Yao and Li, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
    Resources" (2024), arXiv 2402.11505, with one rank for all users. The mean is weighted by the users' numbers of
    examples, as in Federated Averaging. Singular values beyond the first r are lost. A user sends outputs x inputs
    numbers for each layer in addition to the update.
    """

    label = "FlexLoRA"
    answers = ("product", "weight")
    bounds_users = False  # products leave a user as well, and no clip bounds them

    def refuse_settings(self, model: ModelHParams, server: ServerOptimizerHParams) -> None:
        """Raise InputError unless A and B are trained, and the server only averages."""
        if model.lora is None or model.lora.freeze_a:
            raise InputError(
                "training.algorithm FlexLoRA averages products of LoRA's A and B; set model.lora, without freeze_a"
            )
        for name in ("server_optimizer", "server_learning_rate", "server_schedule"):
            if getattr(server, name) != getattr(ServerOptimizerHParams, name):
                raise InputError(f"training.algorithm FlexLoRA replaces A and B; remove training.{name}")

    def answers_like(self, params: Params) -> Moments:
        """Return a matrix [outputs, inputs] for each layer, under the name of its A, and a number."""
        products = {
            of_a: params[of_a].new_zeros(len(params[of_b]), params[of_a].shape[1])
            for of_a, of_b in pairs(params).items()
        }
        return {"product": products, "weight": {"records": torch.zeros(1)}}

    def train(self, user: User) -> Answer:
        """Train a user as in Federated Averaging, and add B_k A_k times the number of records of all steps."""
        trained, records = user.train(), sum(len(batch.inputs) for batch in user.batches)
        local = {name: value.detach() + trained.delta[name] for name, value in user.model.trainable.items()}
        products = {of_a: records * (local[of_b] @ local[of_a]) for of_a, of_b in pairs(local).items()}
        return Answer(trained, {"product": products, "weight": {"records": torch.tensor([float(records)])}})

    def aggregate(self, round_: ServerRound) -> tuple[Params, Moments]:
        update, records = dict(round_.mean), float(round_.summed["weight"]["records"])
        for of_a, of_b in pairs(update).items() if records else ():
            a, b = round_.params[of_a].double(), round_.params[of_b].double()
            next_a, next_b = factors(round_.summed["product"][of_a] / records, a)
            update |= {of_a: next_a - a, of_b: next_b - b}
        return update, round_.own


def pairs(params: Params) -> dict[str, str]:
    """Return the name of each adapter's A, with that of its B."""
    return {name: name.replace(".lora_A.", ".lora_B.") for name in params if ".lora_A." in name}


def factors(product: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next A [r, inputs] and B [outputs, r] from the truncated singular value decomposition of a product.

    A has the right singular vectors, whose entries of largest size are positive, and B the left ones times the singular
    values. If a singular value is 0, the row of A remains that of the last A, and the column of B is zeros: a row of
    zeros would have no gradient. All are float64.
    """
    with threads(1):  # the bits do not depend on the number of threads of a process
        u, s, vt = torch.linalg.svd(product, full_matrices=False)
    zero = max(product.shape) * torch.finfo(s.dtype).eps * s[0]  # as in numpy.linalg.matrix_rank
    rank = min(len(a), int((s > zero).sum()))
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    sign = vt.gather(1, vt.abs().argmax(1, keepdim=True)).sign().flatten()
    next_a, next_b = a.clone(), a.new_zeros(len(product), len(a))
    next_a[:rank], next_b[:, :rank] = sign[:, None] * vt, u * (sign * s)
    return next_a, next_b


ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": FEDAVG,
    "fedprox": FedProx(),
    "scaffold": Scaffold(),
    "flexlora": FlexLoRA(),
}


def algorithm_named(name: str) -> Algorithm:
    """Return a built-in algorithm, or the `Algorithm` at ``path/to/file.py:NAME`` with the options of the name."""
    algorithm: object = extensions.resolve(name, ALGORITHMS, "algorithm")
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        algorithm = extensions.made(name, algorithm)
    elif extensions.options_of(name):
        raise InputError(f"{extensions.name_in_settings(name)}: is an object, which takes no options; name a class")
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"{extensions.name_in_settings(name)}: not a subclass of flsim.algorithms.algorithm.Algorithm; derive the "
            "class from it"
        )
    return algorithm


# The settings of a federated algorithm on the server.

SamplerName = Annotated[str, extensions.CustomName("sampler", SAMPLERS)]
AlgorithmName = Annotated[str, extensions.CustomName("algorithm", ALGORITHMS)]


@settings
class FedAvgHParams(ServerOptimizerHParams):
    """Settings of the server and of its optimizer.

    Attributes:
        algorithm: Federated algorithm, e.g. "fedavg" or "scaffold"; docs/algorithms.md lists all. Change it to compare
            algorithms.
        rounds: Number of rounds to train. Unit: rounds.
        cohort: Number of users in each round; with sampler "poisson" the expected number. Unit: users.
        sampler: "fixed-size" draws exactly `cohort` users without replacement, as in Algorithm 1 of the paper.
            "poisson" takes each of N users with probability cohort / N, independently. "truncated-poisson" is "poisson"
            with at most `limit` users, an option. "with-replacement" draws `cohort` times from all users, as in the
            paper's experiments (footnote 1); a user drawn twice counts twice, and mechanism "dp" is refused.
            "round-robin" takes the users in one random order, one cohort after another, repeatedly. "min-separation"
            divides the users into `separation` groups, an option, and draws from each group in turn. "cyclic-poisson"
            is "min-separation" with Poisson sampling in the group, and "balls-in-bins" takes groups of random sizes.
            "available" draws users who are available. "fedbuff" is asynchronous training: `cohort` answers are a round.
            For custom samplers, see docs/privacy.md.
        algorithm_options: Options of a custom algorithm, e.g. { alpha = 0.1 }: keyword
            arguments, numbers or text. Unit: none.
        sampler_options: Options of the sampler, e.g. { limit = 600 }: see docs/dp.md and docs/participation.md for
            built-in samplers, or keyword arguments of a custom sampler, numbers or text. Unit: none.
    """

    rounds: Count = 8_000
    cohort: Count = 500
    sampler: SamplerName = "fixed-size"
    algorithm: AlgorithmName = "fedavg"
    algorithm_options: Options = field(default_factory=dict)
    sampler_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        extensions.refuse_wrong_options(self, "algorithm")
        refuse_options(self.sampler, self.sampler_options, self.cohort)

    def releases(self, privacy: PrivacyHParams, population: int, rounds: int, length: int) -> Entry:
        """Return the ledger's entry for a number of rounds over a population, in a training of `length` rounds."""
        multiplier, process = privacy.noise_multiplier, extensions.by_content(self.process(privacy, population, length))
        sampler = extensions.by_content(extensions.configured(self, "sampler"))
        return Entry(sampler, population, self.cohort, multiplier, rounds, process)

    def process(self, privacy: PrivacyHParams, population: int, length: int) -> str:
        """Return the name of the noise process of a training, with everything that the noise depends on as options."""
        return settled(
            privacy.process, Sampling(extensions.configured(self, "sampler"), population, self.cohort), length
        )
