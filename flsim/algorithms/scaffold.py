"""SCAFFOLD, whose control variates correct local steps for a user's difference from the population.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning"
(2020), Algorithm 1, with option II for the users' control variates.
"""

from flsim.algorithms.algorithm import Algorithm, Answer, User
from flsim.base.errors import InputError
from flsim.training.hparams import LocalHParams
from flsim.training.state import Moments


class Scaffold(Algorithm):
    """Federated Averaging with control variates: c of the server and c_i of each user, all zeros at first.

    A user takes steps y <- y - eta_l (g_i(y) - c_i + c), then sets c_i+ = c_i - c + (x - y) / (K eta_l), and answers
    with y - x and c_i+ - c_i. The server steps along the plain mean of the first, with its own optimizer, and adds the
    sum of the second, divided by N, to c. A user without records changes nothing, nor does one at a learning rate of 0.
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
        c_i = user.kept["control"] if user.kept else {name: value.new_zeros(value.shape) for name, value in c.items()}
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
