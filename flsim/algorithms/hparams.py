"""The settings of a federated algorithm on the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from flsim.algorithms.built_in import ALGORITHMS
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import at_least_one
from flsim.base.extensions import CustomName, Option, by_content, configured, refuse_unknown, refuse_wrong_options
from flsim.privacy.ledger import Entry
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.sampling import SAMPLERS


@dataclass(frozen=True)
class FedAvgHParams(ServerOptimizerHParams):
    """Settings of the server, with its optimizer.

    Attributes:
        algorithm: Federated algorithm; see docs/algorithms.md.
        rounds: Number of rounds to train. Unit: rounds.
        cohort: Number of users in each round; with sampler "poisson" the expected number. Unit: users.
        sampler: "fixed-size" draws exactly `cohort` users without replacement, as the paper's Algorithm 1. "poisson"
            takes each of N users with probability cohort / N, independently. "with-replacement" draws `cohort` times
            from all users, as the paper's experiments did by its footnote 1; a user drawn twice counts twice, and
            mechanism "dp" is refused. "round-robin" takes the users in one random order, cohort after cohort, again
            and again; "dp" is refused. Your own: see docs/privacy.md.
        algorithm_options: Options of a custom algorithm, e.g. { alpha = 0.1 }: keyword
            arguments, numbers or text. Unit: none.
        sampler_options: Options of a custom sampler, e.g. { block = 8 }: keyword
            arguments, numbers or text. Unit: none.
    """

    rounds: int = 8_000
    cohort: int = 500
    sampler: Annotated[str, CustomName("sampler")] = "fixed-size"
    algorithm: Annotated[str, CustomName("algorithm")] = "fedavg"
    algorithm_options: Mapping[str, Option] = field(default_factory=dict)
    sampler_options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown(self.algorithm, ALGORITHMS, "training.algorithm")
        refuse_unknown(self.sampler, SAMPLERS, "sampler")
        refuse_wrong_options(self, "algorithm", "sampler")
        at_least_one(rounds=self.rounds, cohort=self.cohort)

    def releases(self, privacy: PrivacyHParams, population: int, rounds: int) -> Entry:
        """Return the ledger's entry for a number of rounds over a population of that many users."""
        multiplier, process = privacy.noise_multiplier, by_content(privacy.noise)
        sampler = by_content(configured(self, "sampler"))
        return Entry(sampler, population, self.cohort, multiplier, rounds, process)
