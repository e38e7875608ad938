"""The list of the built-in federated algorithms."""

from flsim.algorithms.algorithm import FEDAVG, Algorithm, Answer, User
from flsim.algorithms.flexlora import FlexLoRA
from flsim.base.errors import InputError
from flsim.base.extensions import declared_label, is_custom, made, name_in_settings, options_of, resolve
from flsim.training.hparams import LocalHParams
from flsim.training.state import Moments

# SCAFFOLD, whose control variates correct local steps for a user's difference from the population.
#
# Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
# Learning" (2020), Algorithm 1, with option II for the users' control variates.


class Scaffold(Algorithm):
    """Federated Averaging with control variates: c of the server and c_i of each user, all zeros at first.

    A user takes steps y <- y - eta_l (g_i(y) - c_i + c), then sets c_i+ = c_i - c + (x - y) / (K eta_l), and answers
    with y - x and c_i+ - c_i. The server steps along the plain mean of the first, with its own optimizer, and adds the
    sum of the second, divided by N, to c. A user without records changes nothing, and neither does a user at a learning
    rate of 0.
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
        """Train a user by Karimireddy et al. (2020), Algorithm 1, lines 7 to 13."""
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


# FedProx, whose proximal term keeps local steps near the global model.
#
# Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks" (2020), Algorithm
# 2.


class FedProx(Algorithm):
    """Federated Averaging whose users minimize their loss + mu / 2 ||w - w_global||^2, equation 2.

    mu is `local.proximal`, which every engine adds. This class requires it to be set, and names the table's row.
    """

    label = "FedProx"

    def refuse(self, local: LocalHParams) -> None:
        """Raise InputError if mu is 0."""
        if not local.proximal:
            raise InputError('training.algorithm "fedprox" needs mu; set local.proximal above 0')


ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": FEDAVG,
    "fedprox": FedProx(),
    "scaffold": Scaffold(),
    "flexlora": FlexLoRA(),
}


def algorithm_named(name: str) -> Algorithm:
    """Return a built-in algorithm by name, or the subclass of `Algorithm` at ``path/to/file.py:NAME``.

    The options of the name are arguments of the class.
    """
    algorithm: object = resolve(name, ALGORITHMS, "algorithm")
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        algorithm = made(name, algorithm)
    elif options_of(name):
        raise InputError(f"{name_in_settings(name)}: takes no options; name a class")
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"{name_in_settings(name)}: not a subclass of flsim.algorithms.algorithm.Algorithm; derive the "
            "class from it"
        )
    return algorithm


def label_of(name: str) -> str:
    """Return the part of a row's name in tables that names the algorithm, without executing custom code."""
    return declared_label(name) if is_custom(name) else ALGORITHMS[name].label
