"""`flsim data`: make, inspect and copy corpora."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flsim.cli.options import MACHINES, Json

data = typer.Typer(
    help="Make, change, inspect and copy corpora.",
    epilog="Example: flsim data import dumps/*.Posts.xml --out corpora/mine",
    no_args_is_help=True,
)
MAKE, LOOK = "Make a corpus", "Inspect or copy a corpus"
FILES, USERS, WORDS = "Format of the files", "Users", "Vocabulary"

Out = Annotated[Path, typer.Option(help="New folder for the corpus, e.g. corpora/mine.")]
From = Annotated[str, typer.Argument(metavar="CORPUS", help="Folder or URI of a corpus, e.g. corpora/mine.")]
RECORD_WORDS = {"words": 20, "characters": 600}  # 600: an English sentence of about 100 words
LAYOUT = "Numbering of special tokens and words, as in tff, fedjax or fedml."


@data.command(
    "import",
    rich_help_panel=MAKE,
    epilog="Example: flsim data import dumps/*.Posts.xml --out corpora/stackexchange\n\n"
    "Example: flsim data import so.sqlite.lzma --vocabulary 10004 --out corpora/so\n\n"
    "Example: flsim data import ptb.txt --format text --by characters --out corpora/ptb\n\n"
    "Example: zcat p.jsonl.gz | flsim data import /dev/stdin --out corpora/posts",
)
def import_(
    sources: Annotated[
        list[Path], typer.Argument(help="Files or pipes, compressed or not; several files become one corpus.")
    ],
    out: Out,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Size of the vocabulary in token ids, e.g. 5000; four of them are special.",
            show_default="10,000, or fewer where the text has fewer words",
            rich_help_panel=WORDS,
        ),
    ] = None,
    by: Annotated[
        Literal["words", "characters"],
        typer.Option(
            help="What token ids stand for. With characters, other options count characters where they say words.",
            rich_help_panel=WORDS,
        ),
    ] = "words",
    words_per_record: Annotated[
        int | None,
        typer.Option(
            help="Words at which a record is cut, e.g. 40.", show_default="20, by characters 600", rich_help_panel=WORDS
        ),
    ] = None,
    layout: Annotated[str, typer.Option(help=LAYOUT, rich_help_panel=WORDS)] = "tff",
    vocabulary_from: Annotated[
        Path | None,
        typer.Option(
            help="File of words with counts whose most frequent words are the vocabulary, e.g. so.wordcount.",
            show_default="counts words in SOURCES",
            rich_help_panel=WORDS,
        ),
    ] = None,
    words_per_user: Annotated[
        int,
        typer.Option(
            help="Words of each user. Authors of fewer words are dropped, those of more become several users.",
            rich_help_panel=USERS,
        ),
    ] = 2_000,
    heldout: Annotated[
        float,
        typer.Option(
            help="Share of authors kept out of training as non-members for attacks, 0 to 1.", rich_help_panel=USERS
        ),
    ] = 0.1,
    test: Annotated[
        float,
        typer.Option(
            help="Share of authors kept out of training to measure accuracy and perplexity, 0 to 1.",
            rich_help_panel=USERS,
        ),
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed that decides which authors are kept out.", rich_help_panel=USERS)] = 0,
    format: Annotated[
        str | None,
        typer.Option(
            help="Format of all SOURCES: tff-sqlite, tff-hdf5, fedjax-sqlite, pfl-hdf5, parquet, jsonl, json, csv, "
            "stackexchange, text (a record per line), or your own reader as path/to/file.py:NAME.",
            show_default="told from the content",
            rich_help_panel=FILES,
        ),
    ] = None,
    lines_per_author: Annotated[
        int | None,
        typer.Option(
            help="Consecutive lines of format text that count as one author, e.g. 50.",
            show_default="200",
            rich_help_panel=FILES,
        ),
    ] = None,
    user_column: Annotated[
        str,
        typer.Option(
            help="Column of the author in Parquet or CSV, or key in JSON, e.g. author.id.", rich_help_panel=FILES
        ),
    ] = "user",
    text_column: Annotated[
        str, typer.Option(help="Column of the text in Parquet or CSV, or key in JSON.", rich_help_panel=FILES)
    ] = "text",
    delimiter: Annotated[
        str | None,
        typer.Option(
            help="Character between two fields of CSV, e.g. ; or the word tab.",
            show_default="tab in .tsv files, otherwise a comma",
            rich_help_panel=FILES,
        ),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Site of each Stack Exchange dump, in order, e.g. ai.stackexchange.com. Dumps of one site are parts "
            "of one dump, whose users of equal numbers are the same people.",
            show_default="told from the file names",
            rich_help_panel=FILES,
        ),
    ] = None,
    ascii: Annotated[
        bool,
        typer.Option(
            "--ascii",
            help="Remove characters outside ASCII from plain text, as TensorFlow Federated does.",
            rich_help_panel=FILES,
        ),
    ] = False,
    drop_authors: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Authors whose posts are dropped, e.g. nan,AutoModerator.",
            show_default="none",
            rich_help_panel=USERS,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of processes, e.g. 4.", show_default="one per core", rich_help_panel=MACHINES),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn files of posts into a corpus of users.

    All users get about the same number of words. Test and held-out authors are also kept whole: accuracy and perplexity
    are measured on whole test authors.

    Files compressed by gz, bz2, xz, lzma, zst or 7z are unpacked while they are read.

    An interrupted import continues when you repeat the command.
    """
    from flsim.data.importing.gather import ImportHParams
    from flsim.data.importing.run import import_corpus
    from flsim.data.inspect import inspect

    hparams = ImportHParams(
        vocabulary_size=ImportHParams.vocabulary_size if vocabulary is None else vocabulary,
        record_words=RECORD_WORDS[by] if words_per_record is None else words_per_record,
        words_per_user=words_per_user,
        heldout=heldout,
        test=test,
        seed=seed,
        layout=layout,
        by=by,
        ascii=ascii,
        drop_authors=tuple(filter(None, map(str.strip, (drop_authors or "").split(",")))),
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
        lines_per_author=lines_per_author,
        sites=site or (),
        delimiter="\t" if delimiter in ("tab", r"\t") else delimiter,
    )
    show(inspect(corpus), as_json)


@data.command(
    "inspect",
    rich_help_panel=LOOK,
    epilog="Example: flsim data inspect corpora/stackexchange",
)
def inspect_(
    corpus: From,
    as_json: Json = False,
) -> None:
    """Describe a corpus.

    Prints the numbers of users, records and words, quantiles of the lengths of records and users, which users are
    members, and how much text the import dropped. The output of `--json` also has histograms of the lengths.
    """
    from flsim.data.corpus import Corpus
    from flsim.data.inspect import inspect

    show(inspect(Corpus.open(corpus, verify=True)), as_json)


@data.command(
    "push", rich_help_panel=LOOK, epilog="Example: flsim data push corpora/stackoverflow s3://bucket/stackoverflow"
)
def push_(
    corpus: Annotated[Path, typer.Argument(help="Folder of a corpus, e.g. corpora/mine.")],
    uri: Annotated[
        str, typer.Argument(metavar="URI", help="Place for the copy: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.")
    ],
) -> None:
    """Copy a corpus into an object store.

    Runs on other machines read the copy when their data.corpus is the URI.

    An interrupted copy continues when you repeat the command.
    """
    from flsim.data.corpus import Corpus
    from flsim.data.stores import push

    push(Corpus.open(corpus, verify=True).path, uri)


def show(values: dict[str, Any], as_json: bool) -> None:
    """Print the summary of a corpus that `inspect` returned, as JSON or as text."""
    from flsim.data.describe import describe

    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    encoding = sys.stdout.encoding or "ascii"
    typer.echo(describe(values).encode(encoding, "replace").decode(encoding))
