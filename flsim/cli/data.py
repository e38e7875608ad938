"""`flsim data`: make, change, inspect and copy corpora, and canaries for a training without flsim."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flsim.base.errors import InputError, RunFailed
from flsim.base.progress import say
from flsim.cli.options import Json, Overrides, of_machines

if TYPE_CHECKING:
    from flsim.data.corpus import Corpus
    from flsim.data.records import By

data = typer.Typer(
    help="Make, change, inspect and copy corpora.",
    epilog="Example: flsim data import dumps/*.Posts.xml --out corpora/mine",
    no_args_is_help=True,
)
MAKE, LOOK = "Make a corpus", "Inspect or copy a corpus"
of_files = partial(typer.Option, rich_help_panel="Format of the files")
of_users = partial(typer.Option, rich_help_panel="Users")
of_words = partial(typer.Option, rich_help_panel="Vocabulary")

Out = Annotated[Path, typer.Option(help="New folder for the corpus, e.g. corpora/mine.")]
From = Annotated[str, typer.Argument(metavar="CORPUS", help="Folder or URI of a corpus, e.g. corpora/mine.")]
RECORD_WORDS = {"words": 20, "characters": 600, "tokens": 64}  # 600: an English sentence of about 100 words
LAYOUT = "Numbering of special tokens and words, as in tff, fedjax or fedml."


@data.command("import", rich_help_panel=MAKE)
def import_(
    sources: Annotated[list[Path], typer.Argument()],
    out: Out,
    vocabulary: Annotated[int | None, of_words(show_default="10,000, or fewer if the text has fewer words")] = None,
    by: Annotated[Literal["words", "characters"], of_words()] = "words",
    tokenizer: Annotated[Path | None, of_words(metavar="FOLDER", show_default="cuts the text into words")] = None,
    train_tokenizer: Annotated[int | None, of_words(metavar="TOKENS", show_default="cuts the text into words")] = None,
    words_per_record: Annotated[int | None, of_words(show_default="20, by characters 600, with a tokenizer 64")] = None,
    layout: Annotated[str, of_words(help=LAYOUT)] = "tff",
    vocabulary_from: Annotated[Path | None, of_words(show_default="counts words in SOURCES")] = None,
    words_per_user: Annotated[int, of_users()] = 2_000,
    heldout: Annotated[float, of_users()] = 0.1,
    test: Annotated[float, of_users()] = 0.1,
    seed: Annotated[int, of_users()] = 0,
    format: Annotated[str | None, of_files(show_default="detected from the content")] = None,
    lines_per_author: Annotated[int | None, of_files(show_default="200")] = None,
    user_column: Annotated[str, of_files()] = "user",
    text_column: Annotated[str, of_files()] = "text",
    prompt_column: Annotated[str | None, of_files(show_default="no prompts")] = None,
    delimiter: Annotated[str | None, of_files(show_default="tab in .tsv files, otherwise a comma")] = None,
    ascii: Annotated[bool, of_files("--ascii")] = False,
    drop_authors: Annotated[str | None, of_users(metavar="NAME,...", show_default="none")] = None,
    workers: Annotated[int | None, of_machines(show_default="one per core")] = None,
    as_json: Json = False,
) -> None:
    """Turn files of posts into a corpus of users.

    All users get about the same number of words. The corpus also has the complete text of test and held-out authors:
    accuracy and perplexity are measured on complete test authors.

    Files compressed with gz, bz2, xz, lzma, zst or 7z are decompressed while they are read.

    An interrupted import continues when you repeat the command.

    Example: flsim data import dumps/*.Posts.xml --out corpora/stackexchange

    Example: flsim data import so.sqlite.lzma --vocabulary 10004 --out corpora/so

    Example: flsim data import ptb.txt --format text --by characters --out corpora/ptb

    Example: flsim data import posts.jsonl --train-tokenizer 4096 --out corpora/bpe

    Args:
        sources: Files, which can be compressed; several files become one corpus.
        vocabulary: Size of the vocabulary in token ids, e.g. 5000; four of them are special.
        by: Unit of text with a token id. With characters, options that count words count characters.
        tokenizer: Folder of a Hugging Face tokenizer that cuts the text, with tokenizer.json.
        train_tokenizer: Cut the text with a byte-level BPE tokenizer with this number of tokens, e.g. 4096. It is
            trained on the train users.
        words_per_record: Number of words after which a record is cut, e.g. 40. With a tokenizer, the number of tokens;
            longer texts become several records.
        vocabulary_from: File of words with counts whose most frequent words are the vocabulary, e.g. so.wordcount.
        words_per_user: Number of words of each user, without punctuation. Authors with fewer words are dropped, and
            authors with more words become several users.
        heldout: Probability that an author is kept out of training as a non-member for attacks, 0 to 1.
        test: Probability that an author is kept out of training to measure accuracy and perplexity, 0 to 1.
        seed: Seed that determines which authors are kept out.
        format: Format of all SOURCES: tff-sqlite, tff-hdf5, parquet, jsonl, json, csv, stackexchange, text (a record
            per line), or a custom reader as path/to/file.py:NAME.
        lines_per_author: Consecutive lines of format text that count as an author, e.g. 50.
        user_column: Column of the author in Parquet or CSV, or key in JSON, e.g. author.id.
        text_column: Column of the text in Parquet or CSV, or key in JSON.
        prompt_column: With a tokenizer: column of a prompt in Parquet or CSV, or key in JSON, which the text answers,
            e.g. instruction. Models are trained on the answers only.
        delimiter: Character between two fields of CSV, e.g. ; or the word tab.
        ascii: Remove characters outside ASCII from plain text, as TensorFlow Federated does.
        drop_authors: Authors whose posts are dropped, e.g. nan,AutoModerator.
        workers: Number of processes, e.g. 4.
    """
    from flsim.data.importing.gather import ImportHParams
    from flsim.data.importing.tasks import import_corpus

    sizes = [size for size in (train_tokenizer, vocabulary) if size is not None]
    cuts = {"--tokenizer": tokenizer, "--train-tokenizer": train_tokenizer, "--vocabulary": vocabulary}
    named = [name for name, value in cuts.items() if value is not None]
    has_tokenizer = tokenizer is not None or train_tokenizer is not None
    if has_tokenizer and (len(named) > 1 or by != "words"):
        raise InputError(f"{' and '.join(named)}{' and --by' if by != 'words' else ''}: give one of them")
    units: By = "tokens" if has_tokenizer else by
    hparams = ImportHParams(
        vocabulary_size=(*sizes, ImportHParams.vocabulary_size)[0],
        record_words=RECORD_WORDS[units] if words_per_record is None else words_per_record,
        words_per_user=words_per_user,
        heldout=heldout,
        test=test,
        seed=seed,
        layout=layout,
        by=units,
        ascii=ascii,
        drop_authors=tuple(filter(None, map(str.strip, (drop_authors or "").split(",")))),
    )
    corpus = import_corpus(
        sources,
        out,
        hparams,
        format,
        vocabulary_from=vocabulary_from,
        columns=(user_column, text_column),
        workers=workers,
        fit_vocabulary=vocabulary is None,
        lines_per_author=lines_per_author,
        delimiter="\t" if delimiter in ("tab", r"\t") else delimiter,
        tokenizer=tokenizer,
        prompt_column=prompt_column,
    )
    show(corpus, as_json)


@data.command("inspect", rich_help_panel=LOOK)
def inspect_(corpus: From, as_json: Json = False) -> None:
    """Describe a corpus.

    Prints the numbers of users, records and words, quantiles of the lengths of records and users, which users are
    members, and how much text the import dropped.

    Example: flsim data inspect corpora/stackexchange
    """
    from flsim.data.corpus import Corpus

    show(Corpus.open(corpus, verify=True), as_json)


@data.command("push", rich_help_panel=LOOK)
def push_(corpus: Annotated[Path, typer.Argument()], uri: Annotated[str, typer.Argument(metavar="URI")]) -> None:
    """Copy a corpus into an object store.

    Runs on other machines read the copy when their data.corpus is the URI.

    An interrupted copy continues when you repeat the command.

    Example: flsim data push corpora/stackoverflow s3://bucket/stackoverflow

    Args:
        corpus: Folder of a corpus, e.g. corpora/mine.
        uri: Place for the copy: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.
    """
    from flsim.data.corpus import Corpus
    from flsim.data.stores import push

    push(Corpus.open(corpus, verify=True).path, uri)


def show(corpus: "Corpus", as_json: bool) -> None:
    """Print the summary of a corpus, as JSON or as text."""
    from flsim.data.inspect import describe, inspect

    values = inspect(corpus)
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"  # there can be no standard output
    typer.echo(describe(values).encode(encoding, "replace").decode(encoding))


@data.command(rich_help_panel=MAKE)
def synthetic(
    out: Out,
    users: Annotated[int, of_users()] = 400,
    words_per_user: Annotated[int, of_users()] = 250,
    vocabulary: Annotated[int, of_words()] = 600,
    heterogeneity: Annotated[float, of_users()] = 0.5,
    test_users: Annotated[int, of_users()] = 40,
    heldout_users: Annotated[int, of_users()] = 40,
    layout: Annotated[str, of_words(help=LAYOUT)] = "tff",
    by: Annotated[Literal["words", "characters"], of_words()] = "words",
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Json = False,
) -> None:
    """Make a corpus of random text.

    Word frequencies follow Zipf's law. Each topic has its own frequent words and word order, and each user has a
    mixture of topics.

    Example: flsim data synthetic --users 400 --words-per-user 250 --out corpora/small

    Args:
        users: Number of training users.
        words_per_user: Number of words of each user.
        vocabulary: Size of the vocabulary in token ids; four of them are special.
        heterogeneity: Dirichlet concentration of the topics of a user, above 0: near 0 each user writes about one
            topic, at 100 all users are similar.
        test_users: Number of further users to measure accuracy and perplexity on.
        heldout_users: Number of further users, non-members for attacks.
        by: Unit of text: "words", or "characters", which spell words, in records of up to 96; --vocabulary then counts
            words.
        seed: Seed of the text.
    """
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
    show(make_synthetic(out, hparams, seed), as_json)


CHANGE = "Change a corpus"
of_models = partial(typer.Option, rich_help_panel="The two models")


@data.command(rich_help_panel=CHANGE)
def plant(
    corpus: From, config: Annotated[Path, typer.Option()], out: Out, set_: Overrides = None, as_json: Json = False
) -> None:
    """Plant canaries in the train records of a corpus.

    The canaries and their records are equal to those of a run with this file. Runs on the new corpus use these canaries
    and plant no further canaries. Commands that drop records count how many copies of each canary remain.

    Example: flsim data plant corpora/demo --config experiments/demo.toml --out corpora/planted

    Args:
        config: TOML file of a run; its section canaries and its seed are used, e.g. experiments/demo.toml.
    """
    from flsim.canaries.population import plant_corpus
    from flsim.data.corpus import Corpus
    from flsim.runs.config import load

    settings = load(config, set_ or ())
    show(plant_corpus(Corpus.open(corpus, verify=True), out, settings.canaries, settings.seed), as_json)


@data.command(rich_help_panel=CHANGE)
def deduplicate(
    corpus: From,
    out: Out,
    near: Annotated[float | None, typer.Option(show_default="drops only exact copies")] = None,
    ngram: Annotated[int, typer.Option()] = 2,
    within: Annotated[Literal["corpus", "user"], typer.Option()] = "corpus",
    as_json: Json = False,
) -> None:
    """Drop train records that repeat an earlier record.

    Users remain in the corpus, even if all their records are dropped.

    Example: flsim data deduplicate corpora/planted --near 0.8 --out corpora/distinct

    Args:
        near: Jaccard similarity of word n-grams, above 0 to 1, at which two records count as equal, e.g. 0.8. Slower.
        ngram: Words in an n-gram of --near.
        within: Compare all records of the corpus, or the records of each user separately.
    """
    from flsim.canaries.defences import DeduplicationHParams
    from flsim.canaries.defences import deduplicate as drop_repeated
    from flsim.data.corpus import Corpus

    hparams = DeduplicationHParams(near, within, ngram)
    show(drop_repeated(Corpus.open(corpus, verify=True), out, hparams), as_json)


@data.command(rich_help_panel=CHANGE)
def sanitize(
    corpus: From,
    out: Out,
    share: Annotated[float, typer.Option()] = 0.1,
    epochs: Annotated[float, of_models()] = 20.0,
    batch_size: Annotated[int, of_models()] = 32,
    learning_rate: Annotated[float, of_models()] = 0.01,
    optimizer: Annotated[str, of_models()] = "adam",
    embedding: Annotated[int, of_models()] = 96,
    units: Annotated[int, of_models()] = 670,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[Literal["cpu", "cuda"], of_machines()] = "cpu",
    threads: Annotated[int, of_machines(min=1, metavar="N")] = 1,
    as_json: Json = False,
) -> None:
    """Drop train records that look like secrets.

    Trains two models, each on a random half of the records. A record looks like a secret if the model that was trained
    on it finds it likely, and the other model does not (Carlini et al., The Secret Sharer, Appendix F).

    Records with copies in both halves are not found, so deduplicate the corpus first.

    Example: flsim data sanitize corpora/distinct --share 0.1 --out corpora/sane

    Args:
        share: Share of the train records to drop, above 0 and below 1.
        epochs: Number of passes of each model over its half of the records.
        batch_size: Number of records in a step.
        learning_rate: Learning rate of the optimizer.
        optimizer: Optimizer: sgd, momentum, adam, ..., or a custom optimizer as path/to/file.py:NAME.
        embedding: Size of the word embeddings.
        units: Number of LSTM cells.
        seed: Seed of the split into halves and of the models.
        device: Device to train on.
        threads: CPU threads for torch.
    """
    import torch

    from flsim.canaries.defences import SanitizationHParams
    from flsim.canaries.defences import sanitize as drop_secrets
    from flsim.data.corpus import Corpus
    from flsim.models.architectures import ModelHParams
    from flsim.training.central import CentralHParams

    training = CentralHParams(epochs=epochs, batch_size=batch_size, optimizer=optimizer, learning_rate=learning_rate)
    torch.set_num_threads(threads)
    hparams = SanitizationHParams(share, ModelHParams(embedding, units), training)
    show(drop_secrets(Corpus.open(corpus, verify=True), out, hparams, seed, device), as_json)


# `flsim data canaries` and `flsim data preflight`: canaries for a training without flsim.

ELSEWHERE = "Train elsewhere"
Rows = Literal["jsonl", "csv", "parquet", "instructions"]  # form of records for a training elsewhere


@data.command(rich_help_panel=ELSEWHERE)
def canaries(
    users: Annotated[str, typer.Option(metavar="FILE|N")],
    out: Annotated[Path, typer.Option()],
    vocabulary: Annotated[Path | None, typer.Option(show_default="none")] = None,
    tokenizer: Annotated[Path | None, typer.Option(show_default="none")] = None,
    records: Annotated[int | None, typer.Option(metavar="N")] = None,
    user_column: Annotated[str, typer.Option()] = "user",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE")] = None,
    prefix: Annotated[int, typer.Option()] = 1,
    format: Annotated[Rows, typer.Option(metavar="FORMAT")] = "jsonl",
    layout: Annotated[str, typer.Option(help=LAYOUT)] = "tff",
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Json = False,
) -> None:
    """Draw canaries for a training without flsim.

    Writes records, which replace records of users in your training, and the law that drew them. flsim evaluate
    --canaries and flsim audit read the folder after training.

    Example: flsim data canaries --vocabulary words.txt --users posts.jsonl --set insertions=[1,4,16] --out planted

    Example: flsim data canaries --vocabulary words.txt --users 50 --records 200 --set coins=true --out planted

    Args:
        users: Training data, .jsonl, .csv or .parquet, with a row for each record; or the number of users or clients,
            e.g. 50.
        out: New folder for the canaries, e.g. planted.
        vocabulary: File with the words of phrases, one per line, e.g. words.txt.
        tokenizer: In place of --vocabulary: folder of a Hugging Face model or tokenizer. Phrases consist of its tokens
            that are complete words.
        records: With a number of users: number of records of each user, e.g. 200.
        user_column: Column of the training data that names the user.
        set_: Setting of canaries, e.g. count=20, p_u=[0.1], controls=100 or coins=true; repeatable. flsim settings
            canaries lists all settings.
        prefix: First words of a phrase that an attacker knows; in instruction rows, the prompt.
        format: Form of the records: jsonl, csv, parquet or instructions.
        seed: Seed of phrases, coins and places.
    """
    from flsim.canaries.elsewhere import FILES, CanarySet, OtherUsers, WordList
    from flsim.canaries.spec import CanaryHParams
    from flsim.runs.config.toml import override_value, unknown_keys, validate

    settings: dict[str, Any] = {}
    for text in set_ or ():
        override_value(settings, text)
    for name, hint in unknown_keys(CanaryHParams, settings):
        raise InputError(f"--set {name}: canaries have no such setting; {hint}")
    if users.isdecimal():
        if records is None:
            raise InputError("--records is missing; set the number of records of each user, or name the training data")
        holders = OtherUsers.alike(int(users), records)
    else:
        if records is not None:
            raise InputError("--records: flsim counts the records of the training data; remove --records")
        holders = OtherUsers.in_file(Path(users), user_column)
    if tokenizer is not None and vocabulary is None:
        words = WordList.of_tokenizer(tokenizer)
    elif vocabulary is not None and tokenizer is None:
        words = WordList.read(vocabulary, layout)
    else:
        raise InputError("the words of phrases need either --vocabulary or --tokenizer; set one of them")
    hparams = validate(CanaryHParams, settings, "--set")
    canary_set = CanarySet.draw(words, holders, hparams, seed, prefix)
    canary_set.write(out, format)
    if canary_set.warning:
        say(f"warning: {canary_set.warning}")
    copies = canary_set.planting.insertions
    summary = {
        "canaries": len(copies),
        "with copies": int((copies > 0).sum()),
        "records": int(copies.sum()),
        "users": len(holders),
        "unit": canary_set.unit,
        "file": str(out / FILES[format]),
    }
    typer.echo(json.dumps(summary) if as_json else "\n".join(f"{name}: {value}" for name, value in summary.items()))


@data.command(rich_help_panel=ELSEWHERE)
def preflight(
    planted: Annotated[Path, typer.Argument()],
    training: Annotated[Path, typer.Argument()],
    text_column: Annotated[str, typer.Option()] = "text",
    prompt_column: Annotated[str | None, typer.Option(show_default="no prompt")] = None,
    tokenizer: Annotated[str | None, typer.Option(show_default="words")] = None,
    record_length: Annotated[int | None, typer.Option(min=1, show_default="no limit")] = None,
    mask_prompt: Annotated[bool, typer.Option("--mask-prompt")] = False,
    no_begin: Annotated[bool, typer.Option("--no-begin")] = False,
    as_json: Json = False,
) -> None:
    """Check that a training without flsim would train on its canaries.

    Counts the copies of each canary in the training file, and the tokens of its unknown words that have loss with a
    tokenizer, a record length and a prompt mask. The exit code is 1 if a canary has no loss, or has another number of
    copies than in the folder.

    Example: flsim data preflight planted train.jsonl --tokenizer models/gpt2 --record-length 128

    Example: flsim data preflight planted train.jsonl --prompt-column prompt --text-column completion --mask-prompt

    Args:
        planted: Folder that flsim data canaries wrote, e.g. planted.
        training: Training file with the canaries in place, .jsonl, .csv or .parquet, e.g. train.jsonl.
        text_column: Column of the text; in instruction rows, of the completion.
        prompt_column: Column of the prompt, before the text.
        tokenizer: Folder of a Hugging Face tokenizer; or your function from text to token ids, as path/to/file.py:NAME.
            The file is executed.
        record_length: Longest record of training in tokens, e.g. 128.
        mask_prompt: Prompts have no loss.
        no_begin: Records have no begin token.
    """
    from flsim.canaries.elsewhere import NONE, CanarySet, ReadingOfRecords, encoder, read_records
    from flsim.canaries.elsewhere import preflight as check
    from flsim.show.table import Field, json_rows, table_of

    how = ReadingOfRecords(encoder(tokenizer), record_length, mask_prompt, not no_begin)
    checked = check(CanarySet.read(planted), how, read_records(training, text_column, prompt_column))
    if as_json:
        typer.echo(json.dumps(json_rows(checked)))
    else:
        numbers = {"Copies": "planned", "Found": "found", "Tokens": "tokens", "With loss": "loss"}
        about = "Trained: whether all, part or none of the unknown tokens have loss; others cannot be memorized."
        loss = Field("Trained", "trained", note=about)
        fields = [*(Field(head, name, "{:,}") for head, name in numbers.items()), loss]
        typer.echo(table_of(checked, [Field("Canary", "canary")], [fields]).markdown(), nl=False)
    untrained, other = checked[checked["trained"] == NONE], checked[checked["planned"] != checked["found"]]
    if len(other):
        raise RunFailed(
            f"{training}: has another number of copies than {planted}, e.g. of {other['canary'].iloc[0]}; replace the "
            "records that the folder lists"
        )
    if len(untrained):
        raise RunFailed(f"{training}: {len(untrained)} canaries have no loss, e.g. {untrained['canary'].iloc[0]}")
