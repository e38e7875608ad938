"""`flsim data plant`, `deduplicate` and `sanitize`: write a changed copy of a corpus."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import at_least_one
from flsim.cli.data import From, Out, show
from flsim.cli.options import MACHINES, Json, Overrides

CHANGE = "Change a corpus"
MODELS = "The two models"


class Within(StrEnum):
    """Records among which a repeated one is dropped."""

    corpus = "corpus"
    user = "user"


class Device(StrEnum):
    """Device that trains the models."""

    cpu = "cpu"
    cuda = "cuda"


def add_defences(data: typer.Typer) -> None:
    """Add the commands of this module to `flsim data`."""
    plant_example = "flsim data plant corpora/demo --config experiments/demo.toml --out corpora/planted"
    data.command(rich_help_panel=CHANGE, epilog=f"Example: {plant_example}")(plant)
    near_example = "flsim data deduplicate corpora/planted --near 0.8 --out corpora/distinct"
    data.command(rich_help_panel=CHANGE, epilog=f"Example: {near_example}")(deduplicate)
    sanitize_example = "flsim data sanitize corpora/distinct --share 0.1 --out corpora/sane"
    data.command(rich_help_panel=CHANGE, epilog=f"Example: {sanitize_example}")(sanitize)


def plant(
    corpus: From,
    config: Annotated[
        Path,
        typer.Option(help="TOML file of a run, whose canaries section and seed are used, e.g. experiments/demo.toml."),
    ],
    out: Out,
    set_: Overrides = None,
    as_json: Json = False,
) -> None:
    """Plant canaries in the train records of a corpus.

    The canaries and their places are those that a run with this file would have. Runs on the new corpus use its
    canaries and plant no others. Commands that drop records count how many copies of each canary are left.
    """
    from flsim.canaries.in_corpus import plant_corpus
    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect
    from flsim.runs.config import load

    settings = load(config, set_ or ())
    planted = plant_corpus(Corpus.open(corpus, verify=True), out, settings.canaries, settings.seed)
    show(inspect(planted), as_json)


def deduplicate(
    corpus: From,
    out: Out,
    near: Annotated[
        float | None,
        typer.Option(
            help="Jaccard similarity of word n-grams, above 0 to 1, from which on two records count as equal, e.g. "
            "0.8. Slower.",
            show_default="drops only exact copies",
        ),
    ] = None,
    ngram: Annotated[int, typer.Option(help="Words in an n-gram of --near.")] = 2,
    within: Annotated[
        Within, typer.Option(help="Compare the records of the whole corpus, or of each user separately.")
    ] = Within.corpus,
    as_json: Json = False,
) -> None:
    """Drop train records that repeat an earlier one.

    Users are kept, even those left without records.
    """
    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect
    from flsim.defences.deduplication import DeduplicationHParams
    from flsim.defences.deduplication import deduplicate as drop_repeated

    hparams = DeduplicationHParams(near, within.value, ngram)
    show(inspect(drop_repeated(Corpus.open(corpus, verify=True), out, hparams)), as_json)


def sanitize(
    corpus: From,
    out: Out,
    share: Annotated[float, typer.Option(help="Share of the train records to drop, above 0 and below 1.")] = 0.1,
    epochs: Annotated[
        float, typer.Option(help="Passes of each model over its half of the records.", rich_help_panel=MODELS)
    ] = 20.0,
    batch_size: Annotated[int, typer.Option(help="Records in a step.", rich_help_panel=MODELS)] = 32,
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate of the optimizer.", rich_help_panel=MODELS)
    ] = 0.01,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Optimizer: sgd, momentum, adam, ..., or your own as path/to/file.py:NAME.", rich_help_panel=MODELS
        ),
    ] = "adam",
    embedding: Annotated[int, typer.Option(help="Size of the word embeddings.", rich_help_panel=MODELS)] = 96,
    units: Annotated[int, typer.Option(help="Number of LSTM cells.", rich_help_panel=MODELS)] = 670,
    seed: Annotated[int, typer.Option(help="Seed of the split into halves and of the models.")] = 0,
    device: Annotated[Device, typer.Option(help="Device to train on.", rich_help_panel=MACHINES)] = Device.cpu,
    threads: Annotated[int, typer.Option(help="CPU threads for torch.", rich_help_panel=MACHINES)] = 1,
    as_json: Json = False,
) -> None:
    """Drop train records that look like secrets.

    Trains two models, each on a random half of the records. A record looks like a secret where the model that saw it
    finds it likely and the other one does not (Carlini et al., The Secret Sharer, Appendix F).

    Only a record that occurs once is found, so deduplicate the corpus first.
    """
    import torch

    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect
    from flsim.defences.sanitization import SanitizationHParams
    from flsim.defences.sanitization import sanitize as drop_secrets
    from flsim.models.hparams import ModelHParams
    from flsim.training.central import CentralHParams

    training = CentralHParams(epochs=epochs, batch_size=batch_size, optimizer=optimizer, learning_rate=learning_rate)
    at_least_one(threads=threads)
    torch.set_num_threads(threads)
    hparams = SanitizationHParams(share, ModelHParams(embedding, units), training)
    show(inspect(drop_secrets(Corpus.open(corpus, verify=True), out, hparams, seed, device.value)), as_json)
