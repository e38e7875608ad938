"""Kinds of training in a plan: the settings that decide the cost of a round, and the shortening of a run."""

from dataclasses import dataclass, replace

from flsim.base.errors import InputError
from flsim.base.extensions import by_content, is_own
from flsim.planning.disk import parameters_of
from flsim.runs.config import CentralConfig, Config, FederatedConfig

TRAIN = 6.0  # seconds, about, that a copy is to train
FEWEST, MOST = 8, 2_000  # rounds of a copy
LINES = 6  # saved steps of a central copy
REFERENCES = 100_000  # of a copy's evaluation, at most
SPEED = {"cpu": 4e9, "cuda": 1e13}  # operations a second, to guess how short a copy may be


@dataclass(frozen=True)
class Copy:
    """A shortened run.

    Attributes:
        kind: its kind of run, see `kind_of`.
        config: its settings.
        weight: duration of the run's evaluation, relative to the copy's.
        is_cold: whether it is among the first, which start together with the cluster.
    """

    kind: str
    config: Config
    weight: float
    is_cold: bool = False


def kind_of(config: Config) -> str:
    """Return the kind of a run; runs of one kind differ in cost only by the size and number of rounds."""
    system, model, evaluation = config.system, config.model, config.evaluation
    named = by_content(model.architecture) + (f" {dict(model.options)}" if is_own(model.architecture) else "")
    parts: list[object] = [config.privacy.mechanism, named, model.embedding, model.units, model.layers]
    if isinstance(config, FederatedConfig):
        local = config.local
        parts = ["federated", config.system.engine, *parts, config.system.known_shards, config.system.cpus_per_client]
        parts += [local.batch_size, local.epochs, local.max_records, local.precision, config.system.micro_cohort]
    elif isinstance(config, CentralConfig):
        parts = ["central", config.system.engine, *parts, config.system.device, config.system.workers]
        parts += [config.system.threads, config.training.precision]
    parts += [system.evaluators, evaluation.references, evaluation.decide, evaluation.also, evaluation.test_users]
    return " ".join(map(str, parts))


def is_in_process(config: Config, whole_cluster: bool) -> bool:
    """Return whether a sweep trains a run in one process, which evaluates it too; see `server.sweep`."""
    return not whole_cluster and config.system.is_one_process


def shortened(
    kind: str, config: Config, words_a_user: float, records_a_user: float, vocabulary: int, device: str
) -> Copy:
    """Return a shortened copy of a run with two evaluations.

    The second evaluation is after the last round and the first just before it, so that the rounds before are
    undisturbed.
    """
    words = words_a_user / max(records_a_user, 1)
    device = config.system.device if isinstance(config, CentralConfig) else device
    of_record = 6 * parameters_of(config, vocabulary) * (words + 1) / SPEED[device]
    tracking = tuple(tracker for tracker in config.system.tracking if tracker == "tensorboard")
    references = min(config.evaluation.references, REFERENCES)
    weight = config.evaluation.references / references
    if isinstance(config, FederatedConfig):
        of_user = 0.001 + of_record * records_a_user * config.local.epochs
        cohort = max(1, min(config.training.cohort, int(TRAIN / FEWEST / of_user)))
        rounds = _length(TRAIN / (0.02 + cohort * of_user))
        federated = replace(config.training, cohort=cohort, rounds=rounds, epochs=None)
        evaluation = replace(config.evaluation, every=rounds - 1, every_epochs=None, references=references)
        system = replace(config.system, tracking=tracking)
        return Copy(kind, replace(config, training=federated, evaluation=evaluation, system=system), weight)
    if isinstance(config, CentralConfig):
        steps = _length(TRAIN / (0.001 + config.round_size * of_record))
        line = max(1, steps // LINES)
        central = replace(config.training, steps=LINES * line, words=None)
        every = (LINES - 1) * line
        stepwise = replace(config.evaluation, every=every, every_epochs=None, references=references)
        of_central = replace(config.system, tracking=tracking, checkpoint_every=line)
        return Copy(kind, replace(config, training=central, evaluation=stepwise, system=of_central), weight)
    raise InputError(f"{type(config).__name__}: this kind of training cannot be calibrated; plan with --no-calibration")


def _length(rounds: float) -> int:
    return int(min(max(rounds, FEWEST), MOST))
