"""The settings of a federated algorithm on the server."""

from dataclasses import field
from typing import Annotated

from flsim.algorithms.built_in import ALGORITHMS
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.extensions import CustomName, by_content, configured, refuse_wrong_options
from flsim.base.settings import Count, Options, settings
from flsim.privacy.ledger import Entry
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.noise import settled
from flsim.privacy.sampling import SAMPLERS, Sampling, refuse_options

SamplerName = Annotated[str, CustomName("sampler", SAMPLERS)]
AlgorithmName = Annotated[str, CustomName("algorithm", ALGORITHMS)]


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
        refuse_wrong_options(self, "algorithm")
        refuse_options(self.sampler, self.sampler_options, self.cohort)

    def releases(self, privacy: PrivacyHParams, population: int, rounds: int, length: int) -> Entry:
        """Return the ledger's entry for a number of rounds over a population, in a training of `length` rounds."""
        multiplier, process = privacy.noise_multiplier, by_content(self.process(privacy, population, length))
        sampler = by_content(configured(self, "sampler"))
        return Entry(sampler, population, self.cohort, multiplier, rounds, process)

    def process(self, privacy: PrivacyHParams, population: int, length: int) -> str:
        """Return the name of the noise process of a training, with everything that the noise depends on as options."""
        return settled(privacy.process, Sampling(configured(self, "sampler"), population, self.cohort), length)
