"""Errors of training that are known before a run has a folder."""

from flsim.data.corpus import Split
from flsim.privacy import report
from flsim.runs.config import Config


def foresee_training(settings: Config, train: Split) -> None:
    """Raise InputError if training on these users could not begin, or its privacy could not be accounted for."""
    settings.training_of(train, rounds := settings.rounds_over(train))
    settings.evaluation.refuse_too_large(settings.canaries.unknown_words(settings.evaluation.prefix))
    if settings.privacy.mechanism == "dp":
        units = settings.protected(train)
        delta, entry = settings.privacy.delta_for(units), settings.planned(units, rounds)
        report.foresee(entry, settings.sampler, delta, units, settings.unit)
