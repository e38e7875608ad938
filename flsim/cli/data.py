"""`flsim data`: make and inspect corpora."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flsim.cli.options import Json

data = typer.Typer(help="Make and inspect corpora.", no_args_is_help=True)


@data.command(
    "import",
    epilog="Example: flsim data import dumps/*.Posts.xml --out corpora/stackexchange\n\n"
    "Example: flsim data import stackoverflow.sqlite.lzma --vocabulary 10004 --out corpora/stackoverflow\n\n"
    "Example: zcat posts.jsonl.gz | flsim data import /dev/stdin --user-column author --out corpora/posts",
)
def import_(
    sources: Annotated[list[Path], typer.Argument(help="Files or pipes, maybe compressed; several are one corpus.")],
    out: Annotated[Path, typer.Option(help="Folder of the new corpus.")],
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Token ids, the four special ones included, e.g. 5000 (default 10,000, or fewer where the text has "
            "fewer words)."
        ),
    ] = None,
    layout: Annotated[str, typer.Option(help="Of token ids: tff, fedjax or fedml.")] = "tff",
    vocabulary_from: Annotated[
        Path | None,
        typer.Option(help="File of words with counts to take the vocabulary from; counted where not given."),
    ] = None,
    words_per_user: Annotated[int, typer.Option(help="Words of a balanced user.")] = 2_000,
    heldout: Annotated[float, typer.Option(help="Share of authors kept out of training for attacks.")] = 0.1,
    test: Annotated[float, typer.Option(help="Share of authors kept out of training to measure utility.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Decides which authors are kept out.")] = 0,
    format: Annotated[
        str | None,
        typer.Option(
            help="tff-sqlite, tff-hdf5, fedjax-sqlite, pfl-hdf5, parquet, jsonl or stackexchange, or a reader of your "
            "own as path/to/file.py:NAME; default by content."
        ),
    ] = None,
    user_column: Annotated[str, typer.Option(help="Where Parquet and JSON lines have the author.")] = "user",
    text_column: Annotated[str, typer.Option(help="Where Parquet and JSON lines have the text.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Processes; default one for each core.")] = None,
    as_json: Json = False,
) -> None:
    """Turn dumps into a corpus of balanced users.

    Sources that are compressed (gz, bz2, xz, lzma) are unpacked on the way.

    An import that was interrupted continues when the same command is given again.
    """
    from flsim.data.importing.run import ImportHParams, import_corpus
    from flsim.data.inspect import inspect

    hparams = ImportHParams(
        vocabulary_size=ImportHParams.vocabulary_size if vocabulary is None else vocabulary,
        words_per_user=words_per_user,
        heldout=heldout,
        test=test,
        seed=seed,
        layout=layout,
    )
    columns = (user_column, text_column)
    corpus = import_corpus(
        sources,
        out,
        hparams,
        format,
        vocabulary_from=vocabulary_from,
        columns=columns,
        workers=workers,
        fit_vocabulary=vocabulary is None,
    )
    show(inspect(corpus), as_json)


@data.command(
    epilog="Example: flsim data make my_corpus.py:letters --set users=100 --vocabulary 500 --out corpora/letters"
)
def make(
    maker: Annotated[str, typer.Argument(help="Your own maker as path/to/file.py:NAME, or synthetic.")],
    out: Annotated[Path, typer.Option(help="Folder of the new corpus.")],
    seed: Annotated[int, typer.Option(help="Seed of the maker, and of which users are kept out of training.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the maker, as in TOML.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Token ids, the four special ones included (default 10,000; synthetic: 600).")
    ] = None,
    words_per_user: Annotated[
        int | None, typer.Option(help="Cut users into ones of so many words; by default they stay as they are made.")
    ] = None,
    heldout: Annotated[
        float | None, typer.Option(help="Share of users kept out of training for attacks (default 0.1).")
    ] = None,
    test: Annotated[
        float | None, typer.Option(help="Share of users kept out of training to measure utility (default 0.1).")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Layout of token ids: tff (default), fedjax or fedml.")] = None,
    as_json: Json = False,
) -> None:
    """Make a corpus by code.

    A maker of your own is a function that yields (user, sentences) or (user, sentences, split). Its arguments are
    `seed`, where it has one, and the options that you set.

    A call that was interrupted continues when the same command is given again.
    """
    from flsim.data.inspect import inspect
    from flsim.data.making import make_corpus
    from flsim.runs.config.toml import override_value

    options: dict[str, Any] = {}
    for text in set_ or ():
        override_value(options, text)
    writing = {
        "vocabulary_size": vocabulary,
        "words_per_user": words_per_user,
        "heldout": heldout,
        "test": test,
        "layout": layout,
    }
    given = {name: value for name, value in writing.items() if value is not None}
    show(inspect(make_corpus(maker, out, seed, options, given)), as_json)


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
    show(inspect(make_synthetic(out, hparams, seed)), as_json)


@data.command("inspect", epilog="Example: flsim data inspect corpora/stackexchange --plot lengths.png")
def inspect_(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="Folder or URI of a corpus.")],
    plot: Annotated[
        Path | None, typer.Option(help="File for a figure of the lengths: .png, .svg or .pdf; replaced if there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a corpus holds, how long its records and users are, who is a member, and what was dropped."""
    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect

    if plot is None:
        show(inspect(Corpus.open(corpus, verify=True)), as_json, histograms=True)
        return
    from flsim.data.plot import plot_lengths, refuse_plot

    refuse_plot(plot)
    summary = inspect(Corpus.open(corpus, verify=True))
    plot_lengths(summary, plot)
    show(summary, as_json, histograms=True)


@data.command("push", epilog="Example: flsim data push corpora/stackoverflow s3://bucket/corpora/stackoverflow")
def push_(
    corpus: Annotated[Path, typer.Argument(help="Folder of a corpus.")],
    uri: Annotated[str, typer.Argument(metavar="URI", help="Where to, as s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.")],
) -> None:
    """Copy a corpus into an object store, for runs whose `data.corpus` is that URI.

    A copy that was interrupted is completed by the same command.
    """
    from flsim.data.corpus import Corpus
    from flsim.data.remote import push

    push(Corpus.open(corpus, verify=True).path, uri)


def show(values: dict[str, Any], as_json: bool, histograms: bool = False) -> None:
    """Print what `inspect` found."""
    from flsim.data.describe import describe
    from flsim.data.histogram import can_show

    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    encoding = sys.stdout.encoding or "ascii"
    text = describe(values, histograms, blocks=can_show(encoding))
    typer.echo(text.encode(encoding, "replace").decode(encoding))
