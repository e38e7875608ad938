"""A distributed simulation platform for memorization in federated learning.

dump -> records -> vocabulary -> balanced users -> shards            flsim.data
shards + canary spec -> planted overlay + roster -> IID twin         flsim.canaries
each round: cohort -> local SGD per user -> sum -> server step       flsim.training, algorithms; clients, server
checkpoint -> RS, BS, exposure, utility -> rows                      flsim.measures.memorization, evaluation
rows -> tables, differences                                          flsim.results
        -> text, figures                                             flsim.show

The names below are public, and docs/python.md shows examples. Each name is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flsim.api import *  # noqa: F403

    __version__: str  # of the installed distribution; only pyproject.toml contains it

__all__ = [
    "Canaries",
    "CanaryUsers",
    "Central",
    "CentralSGD",
    "Corpus",
    "Diverged",
    "Elsewhere",
    "Extraction",
    "FedAvg",
    "Forgetting",
    "ImportSettings",
    "InputError",
    "LocalSGD",
    "Lora",
    "Model",
    "Planted",
    "Privacy",
    "Revealed",
    "Run",
    "RunFailed",
    "ServerOptimizer",
    "State",
    "audit",
    "audit_simulation",
    "compare",
    "epsilon",
    "evaluate",
    "extract",
    "extract_personal_data",
    "frames",
    "from_forward",
    "import_corpus",
    "infer_by_shadows",
    "infer_membership",
    "infer_users",
    "load_model",
    "make_corpus",
    "measure_forgetting",
    "open_corpus",
    "open_run",
    "plant",
    "plot",
    "reveal",
    "run",
    "simulate",
    "sweep",
    "table",
    "write_report",
]


if not TYPE_CHECKING:  # otherwise mypy would accept every misspelled name

    def __getattr__(name: str) -> Any:
        """Load the public names on first use, so that `import flsim` takes no time."""
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                return version("flsim-memorization")
            except PackageNotFoundError:  # a source folder that is not installed, such as Flower's copy of the app
                return "0+unknown"
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from flsim import api

        return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__, "__version__"]
