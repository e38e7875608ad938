"""`flsim data make` and `flsim data synthetic`: corpora that are made, not imported."""

from typing import Annotated, Any, Literal

import typer

from flsim.cli.data import LAYOUT, MAKE, USERS, WORDS, Out, show
from flsim.cli.options import Json


def add_making(data: typer.Typer) -> None:
    """Add the commands of this module to `flsim data`."""
    make_example = "flsim data make my.py:letters --vocabulary 500 --out corpora/letters"
    own_example = "flsim data make synthetic --set users=100 --out corpora/small"
    data.command(rich_help_panel=MAKE, epilog=f"Example: {make_example}\n\nExample: {own_example}")(make)
    random_example = "flsim data synthetic --users 400 --words-per-user 250 --out corpora/small"
    data.command(rich_help_panel=MAKE, epilog=f"Example: {random_example}")(synthetic)


def make(
    maker: Annotated[
        str, typer.Argument(help="Your own maker, e.g. my_corpus.py:letters, or synthetic for the built-in one.")
    ],
    out: Out,
    seed: Annotated[int, typer.Option(help="Seed of the maker, and of which users are kept out of training.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Argument for the maker, e.g. users=100; repeatable."),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Size of the vocabulary in token ids; four of them are special.",
            show_default="10000, for synthetic 600",
            rich_help_panel=WORDS,
        ),
    ] = None,
    words_per_user: Annotated[
        int | None,
        typer.Option(
            help="Words of each user, e.g. 2000. Longer users become several, shorter ones are dropped.",
            show_default="leaves users as they are made",
            rich_help_panel=USERS,
        ),
    ] = None,
    heldout: Annotated[
        float | None,
        typer.Option(
            help="Share of users kept out of training as non-members for attacks, 0 to 1.",
            show_default="0.1",
            rich_help_panel=USERS,
        ),
    ] = None,
    test: Annotated[
        float | None,
        typer.Option(
            help="Share of users kept out of training to measure accuracy and perplexity, 0 to 1.",
            show_default="0.1",
            rich_help_panel=USERS,
        ),
    ] = None,
    layout: Annotated[str | None, typer.Option(help=LAYOUT, show_default="tff", rich_help_panel=WORDS)] = None,
    as_json: Json = False,
) -> None:
    """Make a corpus by a Python function.

    A maker is a function that yields (user, sentences) or (user, sentences, split). Its arguments are those that you
    give with --set. A maker with an argument named seed also gets --seed.

    An interrupted call continues when you repeat the command.
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
    options_of_writing = {name: value for name, value in writing.items() if value is not None}
    show(inspect(make_corpus(maker, out, seed, options, options_of_writing)), as_json)


def synthetic(
    out: Out,
    users: Annotated[int, typer.Option(help="Number of training users.", rich_help_panel=USERS)] = 400,
    words_per_user: Annotated[int, typer.Option(help="Words of each user.", rich_help_panel=USERS)] = 250,
    vocabulary: Annotated[
        int,
        typer.Option(help="Size of the vocabulary in token ids; four of them are special.", rich_help_panel=WORDS),
    ] = 600,
    heterogeneity: Annotated[
        float,
        typer.Option(
            help="Dirichlet concentration of the topics of a user, above 0: near 0 each user writes about one topic, "
            "at 100 all users are alike.",
            rich_help_panel=USERS,
        ),
    ] = 0.5,
    test_users: Annotated[
        int,
        typer.Option(help="Number of further users to measure accuracy and perplexity on.", rich_help_panel=USERS),
    ] = 40,
    heldout_users: Annotated[
        int, typer.Option(help="Number of further users, non-members for attacks.", rich_help_panel=USERS)
    ] = 40,
    layout: Annotated[str, typer.Option(help=LAYOUT, rich_help_panel=WORDS)] = "tff",
    by: Annotated[
        Literal["words", "characters"],
        typer.Option(
            help='Tokens: "words", or "characters", which spell the words in records of up to 96, and --vocabulary '
            "is that of the words.",
            rich_help_panel=WORDS,
        ),
    ] = "words",
    seed: Annotated[int, typer.Option(help="Seed of all text.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a corpus of random text.

    Word frequencies follow Zipf's law. Each topic has its own frequent words and word order, and each user has a
    mixture of topics.
    """
    from flsim.data.inspect import inspect
    from flsim.data.synthetic import SPELLED, SyntheticHParams, make_synthetic

    hparams = SyntheticHParams(
        users=users,
        test_users=test_users,
        heldout_users=heldout_users,
        words_per_user=words_per_user,
        vocabulary_size=vocabulary,
        heterogeneity=heterogeneity,
        layout=layout,
        by=by,
        record_words=SPELLED if by == "characters" else SyntheticHParams.record_words,
    )
    show(inspect(make_synthetic(out, hparams, seed)), as_json)
