"""Errors of training that are detected before a run has a folder."""

from dataclasses import replace
from typing import TypeVar

from flsim.base.machine import refuse_beyond_memory
from flsim.canaries import planting
from flsim.canaries.population import PlantedCorpus, settled
from flsim.data.corpus import Corpus, Split
from flsim.data.records import Layout
from flsim.measures.built_in import OF_BASE_MODELS
from flsim.privacy import ledger
from flsim.runs.config import Config
from flsim.training import own_model
from flsim.training.own_model import refuse_too_large

Kind = TypeVar("Kind", bound=Config)

REFERENCES = 20_000  # of a base model: each sequence needs a complete forward pass


def settled_on(settings: Kind, corpus: Corpus) -> Kind:
    """Return settings with the values that a corpus and the files of a base model determine.

    By default a base model has fewer references than others, and exposure over all phrases in addition. InputError if
    the corpus has other canaries in place, or there is no such base model.
    """
    canaries, model = settled(corpus, settings.canaries), own_model.settled(settings.model, corpus)
    settings = replace(settings, canaries=canaries, model=model)
    evaluation, default = settings.evaluation, type(settings.evaluation)()
    is_default = (evaluation.references, evaluation.also) == (default.references, default.also)
    if model.architecture != "hf" or not is_default:
        return settings
    also = default.also if canaries.template else OF_BASE_MODELS
    return replace(settings, evaluation=replace(evaluation, references=REFERENCES, also=also))


def refuse_impossible_in(settings: Config, corpus: Corpus, is_trained_here: bool = True) -> None:
    """Raise InputError as `refuse_impossible`, or if the settings have other canaries than the corpus."""
    settings = settled_on(settings, corpus)
    train = corpus.split("train")
    records = None if PlantedCorpus.read(corpus) else train.records
    refuse_impossible(settings, corpus.layout, len(train), records, is_trained_here)


def refuse_impossible(
    settings: Config, layout: Layout, users: int, records: int | None, is_trained_here: bool = True
) -> None:
    """Raise InputError for settings that no run can train or measure, from counts only, without drawing anything.

    `records` is an upper bound if the corpus does not exist yet, and None if the corpus has planted canaries.
    """
    settings.refuse_users(users)
    if records is not None:
        planting.refuse_too_many(settings.canaries, records)
        if not (settings.canaries.template or settings.canaries.phrases):
            planting.refuse_too_long(settings.canaries.length, layout)
    if is_trained_here:
        canaries, prefix = settings.canaries, settings.evaluation.prefix
        continuations = canaries.continuations(prefix, layout.words)
        settings.evaluation.refuse_too_large(canaries.unknown_words(prefix), continuations)
        refuse_too_large(settings.model, layout)
        if settings.model.architecture == "hf":
            needs = settings.footprint(layout)
            what = f"training of {settings.model.label} with records of {layout.record_words:,} tokens"
            remedy = "set a smaller batch_size, import shorter records, or name a smaller base"
            refuse_beyond_memory(needs.memory, what, remedy, needs.gpu)


def foresee_training(settings: Config, train: Split, corpus: Corpus) -> None:
    """Raise InputError for a run that cannot be trained on these users, measured, or accounted for."""
    refuse_impossible_in(settings, corpus)
    settings.training_of(train, rounds := settings.rounds_over(train))
    settings.canaries.refuse_rounded(rounds)
    if settings.privacy.mechanism == "dp":
        units = settings.protected(train)
        delta, entry = settings.privacy.delta_for(units), settings.planned(units, rounds)
        settings.say_end(settings.rounds_asked(train), rounds)
        ledger.foresee(entry, settings.sampler, delta, units, settings.unit)
