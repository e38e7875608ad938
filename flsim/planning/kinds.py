"""Kinds of training in a plan: settings that decide the cost of a round and of an evaluation; shortened runs."""

from dataclasses import dataclass, replace

from flsim.base.errors import InputError
from flsim.base.extensions import by_content, is_own
from flsim.canaries.spec import distinct_configurations
from flsim.planning.cost import Need
from flsim.planning.disk import parameters_of
from flsim.runs.config import CentralConfig, Config, FederatedConfig, ScheduledEvaluationHParams
from server.launch import needs_no_ray

TRAIN = 6.0  # seconds, about, that a copy is to train
FEWEST, MOST = 8, 2_000  # rounds of a copy
LINES = 6  # saved steps of a central copy
REFERENCES = 100_000  # of a copy's evaluation, at most
FEWEST_REFERENCES = 1_000
SPEED = {"cpu": 4e9, "cuda": 1e13}  # operations a second, to guess how short a copy may be
RANKING = {"cpu": 1e13, "cuda": 1e15}  # operations of ranks of a copy's evaluation, without what they share: seconds


@dataclass(frozen=True)
class Copy:
    """A shortened run.

    Attributes:
        kind: its kind of run, see `kind_of`.
        config: its settings.
        is_cold: whether it is among the first, which start together with the cluster.
    """

    kind: str
    config: Config
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
        parts = ["central", config.system.engine, *parts, config.system.device, config.system.threads]
        parts += [config.training.precision]
    parts += [system.evaluators, evaluation.references, evaluation.decide, evaluation.also, evaluation.test_users]
    parts += [canaries_of(config)]
    return " ".join(map(str, parts))


def canaries_of(config: Config) -> int:
    """Return how many canaries an evaluation measures, those that are never planted included."""
    canaries = config.canaries
    planted = canaries.count * len(distinct_configurations(canaries))
    return 0 if config.evaluation.utility_only else planted + canaries.controls


def is_in_process(config: Config, need: Need, whole_cluster: bool) -> bool:
    """Return whether a sweep trains a run with this need in one process, which evaluates it too."""
    return not whole_cluster and needs_no_ray(config, need.gpus)


def shortened(
    kind: str, config: Config, words_a_user: float, records_a_user: float, vocabulary: int, device: str
) -> Copy:
    """Return a shortened copy of a run with two evaluations.

    The second evaluation is after the last round and the first just before it, so that the rounds before are
    undisturbed. Where an evaluation would take minutes, the copy has fewer canaries, and then fewer references; see
    `evaluated_otherwise`.
    """
    words = words_a_user / max(records_a_user, 1)
    device = config.system.device if isinstance(config, CentralConfig) else device
    of_record = 6 * parameters_of(config, vocabulary) * (words + 1) / SPEED[device]
    tracking = tuple(tracker for tracker in config.system.tracking if tracker == "tensorboard")
    config = _evaluated_sooner(config, vocabulary, device)
    if isinstance(config, FederatedConfig):
        of_user = 0.001 + of_record * records_a_user * config.local.epochs
        cohort = max(1, min(config.training.cohort, int(TRAIN / FEWEST / of_user)))
        rounds = _length(TRAIN / (0.02 + cohort * of_user))
        federated = replace(config.training, cohort=cohort, rounds=rounds, epochs=None)
        evaluation = replace(config.evaluation, every=rounds - 1, every_epochs=None)
        system = replace(config.system, tracking=tracking)
        return Copy(kind, replace(config, training=federated, evaluation=evaluation, system=system))
    if isinstance(config, CentralConfig):
        steps = _length(TRAIN / (0.001 + config.round_size * of_record))
        line = max(1, steps // LINES)
        central = replace(config.training, steps=LINES * line, words=None)
        every = (LINES - 1) * line
        stepwise = replace(config.evaluation, every=every, every_epochs=None)
        of_central = replace(config.system, tracking=tracking, checkpoint_every=line)
        return Copy(kind, replace(config, training=central, evaluation=stepwise, system=of_central))
    raise InputError(f"{type(config).__name__}: this kind of training cannot be calibrated; plan with --no-calibration")


def evaluated_otherwise(copy: Copy, run: Config) -> list[Copy]:
    """Return copies with other evaluations that tell what those of the run cost, where those of the copy are smaller.

    With fewer references: one with a quarter, which tells what a reference costs. With fewer canaries: one without any,
    which tells what utility costs, however many there are.
    """
    evaluation, evaluations = copy.config.evaluation, list[ScheduledEvaluationHParams]()
    if evaluation.references < run.evaluation.references:
        evaluations.append(replace(evaluation, references=evaluation.references // 4))
    if canaries_of(copy.config) < canaries_of(run):
        evaluations.append(replace(evaluation, utility_only=True))
    return [replace(copy, config=replace(copy.config, evaluation=changed)) for changed in evaluations]


def _evaluated_sooner(config: Config, vocabulary: int, device: str) -> Config:
    """Return settings with so few canaries, at least one of a configuration, and references that ranks take seconds."""
    references = min(config.evaluation.references, REFERENCES)
    affordable = RANKING[device] / (2 * parameters_of(config, vocabulary) * config.canaries.length)  # ranks of one
    if canaries_of(config) * references > affordable and config.canaries.count:
        most = int(affordable / references / len(distinct_configurations(config.canaries)))
        canaries = replace(config.canaries, count=min(config.canaries.count, max(1, most)), controls=0)
        config = replace(config, canaries=canaries)
        references = min(references, max(FEWEST_REFERENCES, int(affordable / canaries_of(config))))
    return replace(config, evaluation=replace(config.evaluation, references=references))


def _length(rounds: float) -> int:
    return int(min(max(rounds, FEWEST), MOST))
