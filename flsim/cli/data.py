"""`flsim data`: make and inspect corpora."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flsim.cli.options import Json

data = typer.Typer(help="Make and inspect corpora.", no_args_is_help=True)


@data.command("import", epilog="Example: flsim data import dumps/*.Posts.xml --out corpora/stackexchange")
def import_(
    sources: Annotated[
        list[Path], typer.Argument(help="Stack Exchange Posts.xml or JSON lines; several are one corpus.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new corpus.")],
    vocabulary: Annotated[int, typer.Option(help="Token ids, the four special ones included.")] = 10_000,
    words_per_user: Annotated[int, typer.Option(help="Words of a balanced user.")] = 2_000,
    heldout: Annotated[float, typer.Option(help="Share of authors kept out of training for attacks.")] = 0.1,
    test: Annotated[float, typer.Option(help="Share of authors kept out of training to measure utility.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Decides which authors are kept out.")] = 0,
    format: Annotated[str | None, typer.Option(help="stackexchange or jsonl; detected where not given.")] = None,
    as_json: Json = False,
) -> None:
    """Turn a dump into a corpus of balanced users."""
    from flsim.data.importing import ImportHParams, import_corpus
    from flsim.data.inspect import inspect

    hparams = ImportHParams(
        vocabulary_size=vocabulary, words_per_user=words_per_user, heldout=heldout, test=test, seed=seed
    )
    _print(inspect(import_corpus(sources, out, hparams, format)), as_json)


@data.command(epilog="Example: flsim data synthetic --out corpora/small --users 400 --words-per-user 250")
def synthetic(
    out: Annotated[Path, typer.Option(help="Folder of the new corpus.")],
    users: Annotated[int, typer.Option(help="Training users.")] = 400,
    words_per_user: Annotated[int, typer.Option(help="Words of each user.")] = 250,
    vocabulary: Annotated[int, typer.Option(help="Token ids, the four special ones included.")] = 600,
    heterogeneity: Annotated[
        float, typer.Option(help="Dirichlet concentration of users' topics: small is heterogeneous.")
    ] = 0.5,
    test_users: Annotated[int, typer.Option(help="Further users to measure utility on.")] = 40,
    heldout_users: Annotated[int, typer.Option(help="Further users, non-members for attacks.")] = 40,
    layout: Annotated[str, typer.Option(help="Of token ids: tff, fedjax or fedml.")] = "tff",
    seed: Annotated[int, typer.Option(help="Another seed, another corpus.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a corpus of random text: Zipf words, topics with their own word order, users with their own topics."""
    from flsim.data.inspect import inspect
    from flsim.data.synthetic import SyntheticHParams, make_synthetic

    hparams = SyntheticHParams(
        users=users,
        test_users=test_users,
        heldout_users=heldout_users,
        words_per_user=words_per_user,
        vocabulary_size=vocabulary,
        heterogeneity=heterogeneity,
        layout=layout,
    )
    _print(inspect(make_synthetic(out, hparams, seed)), as_json)


@data.command("inspect", epilog="Example: flsim data inspect corpora/stackexchange --json")
def inspect_(corpus: Annotated[Path, typer.Argument(help="Folder of a corpus.")], as_json: Json = False) -> None:
    """Say what a corpus holds, and what was dropped on the way into it."""
    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect

    _print(inspect(Corpus.open(corpus, verify=True)), as_json)


def _print(values: dict[str, Any], as_json: bool) -> None:
    from flsim.data.inspect import describe

    typer.echo(json.dumps(values, indent=2) if as_json else describe(values))
