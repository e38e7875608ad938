"""`flsim data plant`, `deduplicate`, `sanitize`: corpora from corpora."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import at_least_one
from flsim.cli.data import show
from flsim.cli.options import Json, Overrides

From = Annotated[str, typer.Argument(metavar="CORPUS", help="Folder or URI of a corpus.")]
Out = Annotated[Path, typer.Option(help="Folder of the new corpus.")]


class Within(StrEnum):
    """What a record must not repeat."""

    corpus = "corpus"
    user = "user"


class Device(StrEnum):
    """Where models are trained."""

    cpu = "cpu"
    cuda = "cuda"


def add_defences(data: typer.Typer) -> None:
    """Add the commands to those of `flsim data`."""
    plant_example = "flsim data plant corpora/demo --config experiments/demo.toml --out corpora/planted"
    data.command(epilog=f"Example: {plant_example}")(plant)
    data.command(epilog="Example: flsim data deduplicate corpora/planted --near 0.8 --out corpora/distinct")(
        deduplicate
    )
    sanitize_example = "flsim data sanitize corpora/distinct --embedding 32 --units 64 --out corpora/sane"
    data.command(epilog=f"Example: {sanitize_example}")(sanitize)


def plant(
    corpus: From,
    config: Annotated[Path, typer.Option(help="TOML file of a run, whose [canaries] and seed are taken.")],
    out: Out,
    set_: Overrides = None,
    as_json: Json = False,
) -> None:
    """Put canaries into the train records of a corpus.

    The same ones, in the same places, as a run with this configuration would train on. Runs over the new corpus use
    them and plant no others, and what drops records from it keeps count of them.
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
        typer.Option(help="Drop records that are this similar too: Jaccard of word n-grams, above 0 to 1; slow."),
    ] = None,
    ngram: Annotated[int, typer.Option(help="Words in an n-gram of --near.")] = 2,
    within: Annotated[Within, typer.Option(help="Where a record must not repeat another.")] = Within.corpus,
    as_json: Json = False,
) -> None:
    """Drop train records that repeat an earlier one. Users stay, even empty ones."""
    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect
    from flsim.defences.deduplication import DeduplicationHParams
    from flsim.defences.deduplication import deduplicate as drop_repeated

    hparams = DeduplicationHParams(near, within.value, ngram)
    show(inspect(drop_repeated(Corpus.open(corpus, verify=True), out, hparams)), as_json)


def sanitize(
    corpus: From,
    out: Out,
    share: Annotated[float, typer.Option(help="Of the train records that are dropped.")] = 0.1,
    epochs: Annotated[float, typer.Option(help="Passes of each model over its half.")] = 20.0,
    batch_size: Annotated[int, typer.Option(help="Records in a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Of the optimizer.")] = 0.01,
    optimizer: Annotated[
        str, typer.Option(help="Optimizer of the training, such as sgd, or your own as path/to/file.py:NAME.")
    ] = "adam",
    embedding: Annotated[int, typer.Option(help="Size of the models' embeddings.")] = 96,
    units: Annotated[int, typer.Option(help="Cells of the models.")] = 670,
    seed: Annotated[int, typer.Option(help="Of the halves and of the models.")] = 0,
    device: Annotated[Device, typer.Option(help="To train on.")] = Device.cpu,
    threads: Annotated[int, typer.Option(help="Of torch, on a CPU.")] = 1,
    as_json: Json = False,
) -> None:
    """Drop train records that look like secrets: likely under a model that saw them, unlikely under one that did not.

    Two models are trained, each on a random half of the records (Carlini et al., The Secret Sharer, Appendix F).

    It finds what occurs once, so deduplicate first.
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
