"""`flsim data canaries` and `flsim data preflight`: canaries for a training without flsim."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flsim.base.errors import InputError, RunFailed
from flsim.base.progress import say
from flsim.cli.data import LAYOUT
from flsim.cli.options import Json

ELSEWHERE = "Train elsewhere"
Rows = Literal["jsonl", "csv", "parquet", "instructions"]  # form of records for a training elsewhere


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
    for name, close in unknown_keys(CanaryHParams, settings):
        raise InputError(f"--set {name}: canaries have no such setting; did you mean {close}?")
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
    from flsim.canaries.elsewhere import CanarySet
    from flsim.canaries.preflight import NONE, Training, encoder, read_records
    from flsim.canaries.preflight import preflight as check
    from flsim.show.table import Field, json_rows, table_of

    how = Training(encoder(tokenizer), record_length, mask_prompt, not no_begin)
    checked = check(CanarySet.read(planted), how, read_records(training, text_column, prompt_column))
    if as_json:
        typer.echo(json.dumps(json_rows(checked)))
    else:
        numbers = {"Copies": "planned", "Found": "found", "Tokens": "tokens", "With loss": "loss"}
        fields = [*(Field(head, name, "{:,}") for head, name in numbers.items()), Field("Trained", "trained")]
        typer.echo(table_of(checked, [Field("Canary", "canary")], [fields]).markdown(), nl=False)
    untrained, other = checked[checked["trained"] == NONE], checked[checked["planned"] != checked["found"]]
    if len(other):
        raise RunFailed(f"{training}: has another number of copies than {planted}, e.g. of {other['canary'].iloc[0]}")
    if len(untrained):
        raise RunFailed(f"{training}: {len(untrained)} canaries have no loss, e.g. {untrained['canary'].iloc[0]}")
