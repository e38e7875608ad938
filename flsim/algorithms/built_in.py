"""The list of the built-in federated algorithms."""

from flsim.algorithms.algorithm import FEDAVG, Algorithm
from flsim.algorithms.fedprox import FedProx
from flsim.algorithms.scaffold import Scaffold
from flsim.base.errors import InputError
from flsim.base.extensions import as_written, is_own, made, options_of, resolve
from flsim.base.labels import declared_label

ALGORITHMS: dict[str, Algorithm] = {"fedavg": FEDAVG, "fedprox": FedProx(), "scaffold": Scaffold()}


def algorithm_named(name: str) -> Algorithm:
    """Return a built-in algorithm by name, or the subclass of `Algorithm` at ``path/to/file.py:NAME``.

    The options of the name are arguments of the class.

    Raises:
        InputError: there is no algorithm of this name, it does not take these options, or the file failed.
    """
    algorithm: object = resolve(name, ALGORITHMS, "algorithm")
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        algorithm = made(name, algorithm)
    elif options_of(name):
        raise InputError(f"{as_written(name)}: takes no options; name a class")
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"{as_written(name)}: is no flsim.algorithms.algorithm.Algorithm; derive a class from it")
    return algorithm


def label_of(name: str) -> str:
    """Return the algorithm's part of the name of a table's row, without executing a user's file."""
    return declared_label(name) if is_own(name) else ALGORITHMS[name].label
