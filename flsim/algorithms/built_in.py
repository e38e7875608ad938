"""The list of the built-in federated algorithms."""

from flsim.algorithms.algorithm import FEDAVG, Algorithm
from flsim.algorithms.fedprox import FedProx
from flsim.algorithms.scaffold import Scaffold
from flsim.base.errors import InputError
from flsim.base.extensions import is_own, parts, resolve

ALGORITHMS: dict[str, Algorithm] = {"fedavg": FEDAVG, "fedprox": FedProx(), "scaffold": Scaffold()}


def algorithm_named(name: str) -> Algorithm:
    """Return a built-in algorithm, or the one that ``path/to/file.py:NAME`` names: a subclass of `Algorithm`.

    Raises:
        InputError: there is none of that name, or the file failed.
    """
    algorithm: object = resolve(name, ALGORITHMS, "algorithm")
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        algorithm = algorithm()
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"{name}: is no flsim.algorithms.algorithm.Algorithm; derive a class from it")
    return algorithm


def label_of(name: str) -> str:
    """Return what a table's row says, without a user's file being executed."""
    return parts(name)[1] if is_own(name) else ALGORITHMS[name].label
