"""The list of the built-in federated algorithms."""

from flsim.algorithms.algorithm import FEDAVG, Algorithm
from flsim.algorithms.fedprox import FedProx
from flsim.algorithms.scaffold import Scaffold
from flsim.base.errors import InputError
from flsim.base.extensions import is_own, parts, resolve

ALGORITHMS: dict[str, Algorithm] = {"fedavg": FEDAVG, "fedprox": FedProx(), "scaffold": Scaffold()}


def algorithm_named(name: str) -> Algorithm:
    """Return a built-in algorithm by name, or the subclass of `Algorithm` at ``path/to/file.py:NAME``.

    Raises:
        InputError: there is no algorithm of this name, or the file failed.
    """
    algorithm: object = resolve(name, ALGORITHMS, "algorithm")
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        algorithm = algorithm()
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"{name}: is no flsim.algorithms.algorithm.Algorithm; derive a class from it")
    return algorithm


def label_of(name: str) -> str:
    """Return the algorithm's part of the name of a table's row, without executing a user's file."""
    return parts(name)[1] if is_own(name) else ALGORITHMS[name].label
