"""`flsim evaluate`, `quantize` and `verify`: measurement of checkpoints, and verification of rounds."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flsim.base.errors import InputError, RunFailed
from flsim.base.progress import say
from flsim.cli.options import Json, TorchDevice, check_device
from flsim.measures.built_in import ALSO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flsim.canaries.spec import Canary
    from flsim.data.records import Users
    from flsim.data.vocabulary import Layout, Vocabulary
    from flsim.evaluation.evaluate import EvaluationHParams
    from flsim.measures.quantity import Quantity
    from flsim.results.rows import Row
    from flsim.runs.elsewhere import Canaries

    Words = tuple[Layout, Vocabulary | None, Users | None, Path | None]
    Measured = tuple[list[Row], Sequence[Canary], EvaluationHParams]

OF_RUN, OF_MODEL, MEASURES = "A checkpoint of a run", "Any other model (--model)", "Measurements"


def evaluate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Checkpoint of a run, or a run folder for its newest checkpoint; omit it with --model.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="Run folder of the checkpoint, e.g. runs/iid.",
            show_default="the folder above CHECKPOINT's",
            rich_help_panel=OF_RUN,
        ),
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            help="Checkpoint of a run without these canaries, whose scores are subtracted; repeatable. With base, the "
            'model before training of architecture "hf".',
            show_default="no calibrated exposure",
            rich_help_panel=OF_RUN,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FACTORY",
            help="Function or class that returns the model, e.g. model.py:load or package.module:load. The file is "
            "executed: use only code that you trust. Or a folder of a Hugging Face model or adapter, or of several "
            "named by rounds.",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Argument for the function of --model, e.g. width=48; repeatable.",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="State dict to load into the model: .pt, .safetensors, or .npz of a Flower server; or a folder of "
            "them, whose names have the rounds, e.g. round-10.pt.",
            show_default="weights that the function loads",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the model reads, e.g. 32, if it is a module without methods start and step.",
            show_default="none",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    round: Annotated[
        int | None,
        typer.Option(
            help="Round of the model, e.g. 100.", show_default="that in its name, or 0", rich_help_panel=OF_MODEL
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the measurements, e.g. runs/theirs, which table, plot, audit and others read; more rounds "
            "are added.",
            show_default="stores nothing",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="With --out: name of the model in tables.", show_default="that of --model", rich_help_panel=OF_MODEL
        ),
    ] = None,
    canaries: Annotated[
        Path | None,
        typer.Option(
            help="Folder that flsim data canaries wrote; or file of canaries, .csv or .json, with id, words or tokens, "
            "and if known copies, p_u and p_e.",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            metavar="CORPUS",
            help="Folder or URI of a corpus with the model's vocabulary; its test users measure utility.",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="In place of --corpus: file with one word per line in the order of ids, or the number of token "
            "ids, e.g. 10004.",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="With --vocabulary: numbering of special tokens and words, as in tff, fedjax or fedml.",
            rich_help_panel=OF_MODEL,
        ),
    ] = "tff",
    references: Annotated[
        int | None,
        typer.Option(
            help="Number of references to rank each canary against, |R|.",
            show_default="2000000",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    prefix: Annotated[
        int | None,
        typer.Option(
            help="Number of words of a canary that the attacker knows.",
            show_default="1, or that of the folder of canaries",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    beam_width: Annotated[
        int | None,
        typer.Option(
            help="Number of phrases that beam search keeps at each step.", show_default="5", rich_help_panel=OF_MODEL
        ),
    ] = None,
    test_users: Annotated[
        int | None,
        typer.Option(
            help="Number of test users to measure accuracy and perplexity on, e.g. 100.",
            show_default="all",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the references and the test users.",
            show_default="0, or that of the folder of canaries",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    decide: Annotated[
        bool,
        typer.Option(
            "--decide",
            help="Measure only whether each canary is memorized, not its rank. Much faster.",
            rich_help_panel=MEASURES,
        ),
    ] = False,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEASURE",
            help="Further measure; repeatable: "
            + ", ".join(f"{name} ({measure.description})" for name, measure in ALSO.items())
            + ", or a custom measure as path/to/file.py:NAME; flsim executes the file.",
            rich_help_panel=MEASURES,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="With --also space or generation: number of sequences to draw.",
            show_default="5000",
            rich_help_panel=MEASURES,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="With --also space or path: largest number of prefixes that a search reads.",
            show_default="20000",
            rich_help_panel=MEASURES,
        ),
    ] = None,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure which canaries a model memorized.

    Measures a checkpoint with the evaluation settings of its run, and stores the results in the run folder.

    Any other model needs --model and --canaries, and --corpus or --vocabulary unless --canaries is a folder. With --out
    the results are stored as a run folder of measurements; otherwise they are not stored.

    Example: flsim evaluate runs/demo/iid

    Example: flsim evaluate runs/demo/iid/checkpoints/round-000200.safetensors

    Example: flsim evaluate CHECKPOINT --also space --calibrate OTHER_CHECKPOINT

    Example: flsim evaluate --model my.py:load --canaries my.csv --vocabulary words.txt

    Example: flsim evaluate --model my.py:Net --state checkpoints --canaries planted --out runs/theirs

    docs/auditing.md measures a Transformer step by step.
    """
    from flsim.evaluation.evaluate import EvaluationHParams, own_quantities
    from flsim.runs.config.toml import override_value
    from flsim.runs.elsewhere import OtherModel, measure

    how = {"references": references, "prefix": prefix, "beam_width": beam_width, "test_users": test_users}
    settings: dict[str, Any] = {option: value for option, value in how.items() if value is not None}
    of_model: dict[str, object] = {
        "--set": set_ or None,
        "--state": state,
        "--context": context,
        "--round": round,
        "--out": out,
    }
    of_model |= {"--name": name, "--canaries": canaries, "--corpus": corpus, "--vocabulary": vocabulary, "--seed": seed}
    named = [option for option, value in of_model.items() if value is not None]
    named += [f"--{option.replace('_', '-')}" for option in settings]
    if (checkpoint is None) == (model is None):
        raise InputError("name either a checkpoint of a run or a --model")
    check_device(device)
    more = {"decide": decide or None, "also": tuple(also or ()) or None, "samples": samples, "nodes": nodes}
    settings |= {option: value for option, value in more.items() if value is not None}
    if checkpoint is not None:
        if named:
            raise InputError(
                f"{', '.join(named)}: these options are for --model, because a run has its own canaries and "
                "corpus; name a checkpoint or --model, not both"
            )
        rows, measured, hparams = _of_run(checkpoint, run, device, calibrate or (), settings)
    else:
        if run is not None or calibrate:
            raise InputError(
                f"{'--run' if run else '--calibrate'}: this option is for a checkpoint; remove it, or remove --model"
            )
        if canaries is None:
            raise InputError("--canaries is missing; name a folder, or a .csv or .json file, with the phrases")
        if name is not None and out is None:
            raise InputError("--name names stored measurements, and --out is missing; add --out, or remove --name")
        of_factory: dict[str, Any] = {}
        for text in set_ or ():
            override_value(of_factory, text)
        other = OtherModel(str(model), of_factory, state, context, round)
        known, test = _canaries(canaries, corpus, vocabulary, layout)
        hparams = EvaluationHParams(**{"prefix": known.prefix} | settings)
        at = known.seed if seed is None else seed
        rows, measured = measure(other, known, hparams, at, device, test, out, name), known.planting.canaries
    if as_json:
        typer.echo(to_json(rows), nl=True)
        return
    own = own_quantities(hparams.also)
    for number in dict.fromkeys(row.round for row in rows):
        of_round = [row for row in rows if row.round == number]
        heading = f"round {number:,}\n" if len(of_round) < len(rows) else ""
        typer.echo(heading + to_text(of_round, measured, own), nl=False)


def _of_run(
    checkpoint: Path, folder: Path | None, device: str, calibrate: "Sequence[Path]", changes: dict[str, Any]
) -> "Measured":
    from flsim.data.corpus import Corpus
    from flsim.runs.folder import Run
    from flsim.runs.measuring import evaluate_where_writable, newest_checkpoint

    if checkpoint.is_dir():
        checkpoint = newest_checkpoint(Run.open(checkpoint).path)
        say(f"newest checkpoint: {checkpoint}")
    if not checkpoint.is_file():
        raise InputError(f"{checkpoint}: no such checkpoint")
    folder = folder or checkpoint.resolve().parent.parent
    run = Run.open(folder)
    Corpus.open(run.config.data.corpus, verify=True)
    rows = evaluate_where_writable(folder, checkpoint, device, calibrate, **changes)
    return rows, run.canaries, replace(run.config.evaluation, **changes)


def _canaries(path: Path, corpus: str | None, vocabulary: str | None, layout: str) -> "tuple[Canaries, Users | None]":
    """Return the canaries of a folder or a list, and the test users of a corpus."""
    from flsim.canaries.elsewhere import CanarySet
    from flsim.canaries.from_file import read_listed
    from flsim.runs.elsewhere import Canaries

    if not path.is_dir():
        of_tokens, words, test, tokens = _words(corpus, vocabulary, layout)
        listed = Canaries.listed(read_listed(path, of_tokens, words), words, of_tokens)
        return replace(listed, tokens=tokens, are_of_model=corpus is not None), test
    if vocabulary is not None:
        raise InputError(f"--vocabulary: {path} has words of its own; remove the option")
    drawn = CanarySet.read(path)
    if corpus is None:
        return Canaries.of_folder(drawn, path), None
    of_tokens, words, test, _ = _words(corpus, None, layout)
    if words is None or (words.words, words.layout) != (drawn.words.vocabulary.words, drawn.words.layout.name):
        raise InputError(f"--corpus {corpus}: has other words than {path}; name one with its words, or remove it")
    return replace(Canaries.of_folder(drawn, path), layout=of_tokens, are_of_model=True), test


def _words(corpus: str | None, vocabulary: str | None, layout: str) -> "Words":
    """Return the layout; the words, the test users, and the file of a model's ids of its tokens, or None for each."""
    from flsim.canaries.elsewhere import WordList
    from flsim.data.corpus import Corpus
    from flsim.data.tokenizer import TABLE
    from flsim.data.vocabulary import Layout

    if (corpus is None) == (vocabulary is None):
        raise InputError("name either a --corpus with the words of the model or a --vocabulary")
    if corpus is not None:
        opened = Corpus.open(corpus, verify=True)
        test = opened.test_users
        tokens = None if opened.token_map is None else opened.path / TABLE
        return opened.layout, opened.vocabulary, test if len(test) else None, tokens
    source = str(vocabulary)
    if source.isdecimal():
        return Layout(int(source), name=layout), None, None, None
    if not Path(source).is_file():
        raise InputError(f"--vocabulary {source}: not a number or a readable file of words")
    words = WordList.read(Path(source), layout)
    return words.layout, words.vocabulary, None, None


def to_json(rows: "Sequence[Row]") -> str:
    """Return rows as a JSON list; a value that is not finite is null."""
    return json.dumps([asdict(row) | {"value": row.value if math.isfinite(row.value) else None} for row in rows])


def to_text(rows: "Sequence[Row]", canaries: "Sequence[Canary]", own: "Sequence[Quantity]" = ()) -> str:
    """Return a table with a line for each canary, then lines for the model.

    Args:
        rows: the rows of one evaluation.
        canaries: the measured canaries.
        own: quantities that custom measures computed.
    """
    from flsim.results.tables import user_share

    values = {(row.metric, row.canary): row.value for row in rows}
    known = any(math.isfinite(share) for canary in canaries for share in (canary.p_u, canary.p_e))
    columns = _columns({row.metric for row in rows if row.canary}, own)
    lines = [["canary", *(("p_u", "p_e") if known else ()), *(column.short for column in columns)]]
    for canary in sorted(canaries, key=lambda canary: canary.id):
        shares = [
            user_share(canary.p_u) if math.isfinite(canary.p_u) else "-",
            f"{100 * canary.p_e:.6g}%" if math.isfinite(canary.p_e) else "-",
        ]
        cells = [_cell(column, values.get((column.name, canary.id))) for column in columns]
        lines.append([canary.id, *(shares if known else ()), *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text += ["", *_legend(values, columns, len(canaries)), *_utility(values, own)]
    return "\n".join(text) + "\n"


def _columns(measured: set[str], own: "Sequence[Quantity]") -> "list[Quantity]":
    """Return the measured quantities of canaries that have a heading or a description."""
    from flsim.measures.built_in import QUANTITIES, described

    listed = [quantity for quantity in (*QUANTITIES.values(), *own) if quantity.name in measured and quantity.is_listed]
    others = sorted(measured - {*QUANTITIES} - {quantity.name for quantity in own})
    return [*listed, *(quantity for name in others if (quantity := described(name)))]


def _cell(quantity: "Quantity", value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    if quantity.is_flag:
        return "yes" if value else "no"
    return quantity.format.format(value * quantity.scale)


def _legend(values: "Mapping[tuple[str, str], float]", columns: "Sequence[Quantity]", canaries: int) -> list[str]:
    """Return the line of counts for each flag, and lines that explain the columns."""
    from flsim.measures.built_in import QUANTITIES
    from flsim.measures.quantity import flags, numbers
    from flsim.results.rows import REFERENCES

    references = values[REFERENCES, ""]
    standard = [quantity for quantity in QUANTITIES.values() if quantity.is_standard]
    counts = list[str]()
    for flag in flags(standard):
        count = sum(value == 1 for (metric, canary), value in values.items() if metric == flag.name and canary)
        of_all = "" if counts else f" of {canaries}"
        among = f" among {references:,.0f}" if flag.is_ranked else ""
        counts.append(f"{count}{of_all} by {flag.title}{among}")
    names = [f"{number.short}: {number.title.lower()}" for number in numbers(standard) if number.kind == "number"]
    return [
        f"memorized: {', '.join(counts)}",
        "; ".join(names) + f", of at most {math.log2(references + 1):.1f}",
        *(f"{column.short}: {column.about or column.sentence}" for column in columns if not column.is_standard),
    ]


def _utility(values: "Mapping[tuple[str, str], float]", own: "Sequence[Quantity]") -> list[str]:
    """Return the line of utility, and a line for each quantity of the model from custom measures."""
    from flsim.measures.built_in import QUANTITIES
    from flsim.measures.quantity import of_model
    from flsim.results.rows import WHOLE_TEST_USERS

    texts = {
        quantity: f"{quantity.title.lower()} {_cell(quantity, values[quantity.name, ''])}{'%' * quantity.is_percentage}"
        for quantity in of_model((*QUANTITIES.values(), *own))
        if (quantity.name, "") in values and (quantity.is_standard or quantity in own)
    }
    utility = ", ".join(text for quantity, text in texts.items() if quantity.is_standard)
    if whole := values.get((WHOLE_TEST_USERS, "")):
        utility += f", of {whole:,.0f} complete test author{'s' * (whole != 1)}"
    more = [f"{text}: {quantity.sentence}" for quantity, text in texts.items() if not quantity.is_standard]
    return [utility, *more] if utility else more


def quantize(
    run: Annotated[Path, typer.Argument(help="Folder of a run with evaluated checkpoints, e.g. runs/iid.")],
    out: Annotated[Path, typer.Option(help="New run folder for the rounded checkpoints, e.g. runs/iid-8bit.")],
    bits: Annotated[int, typer.Option(help="Bits of each weight; 8 bits allow 256 values in a tensor.")] = 8,
    device: TorchDevice = "cpu",
) -> None:
    """Measure a run again with weights of few bits.

    Rounds the weights of the evaluated checkpoints, measures the rounded models as a new run, and prints both runs.

    The authors of The Secret Sharer (appendix D.3) tried this defence, and memorization did not change.

    Example: flsim quantize runs/iid --out runs/iid-8bit
    """
    from flsim.results.store import read_run
    from flsim.results.tables import memorization_table
    from flsim.runs.quantizing import quantize_run
    from flsim.show.memorization import table_of_runs

    check_device(device)
    quantize_run(run, out, bits, device)
    typer.echo(table_of_runs(memorization_table([read_run(run), read_run(out)])).markdown(), nl=False)


def export(
    run: Annotated[Path, typer.Argument(help='Folder of a run of architecture "hf", e.g. runs/lora.')],
    out: Annotated[Path, typer.Option(help="New folder for the model, e.g. exported.")],
    round: Annotated[
        int | None, typer.Option(help="Round of the checkpoint; of central training, a step.", show_default="the last")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapters to the base: a complete model.")] = False,
) -> None:
    """Write a Hugging Face model that peft or transformers loads.

    Adapters become a folder for peft.PeftModel.from_pretrained. With --merge, and for runs without adapters, the folder
    is a complete model for transformers.AutoModelForCausalLM.from_pretrained.

    Example: flsim export runs/lora --out adapter

    Example: flsim export runs/lora --round 100 --merge --out model
    """
    from flsim.runs.loading import export_network

    export_network(run, out, round, merge)


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder, e.g. runs/iid.")],
    round: Annotated[
        int | None,
        typer.Option(
            help="Logged round to train again, e.g. 120; for central training, a logged step.", show_default="the last"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Device for torch, cpu or cuda; it must be the device of the clients.",
            show_default="cuda if torch finds a GPU",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Train a round again, and compare the result with the log.

    Training starts at the checkpoint before the round. The states after each round must be equal bit for bit.

    The exit code is 1 if they differ: the run was trained on another kind of machine, with other code, or incorrectly.

    Example: flsim verify runs/iid

    Example: flsim verify runs/iid --round 120
    """
    import torch

    from flsim.runs.config import custom_code
    from flsim.runs.folder import Run
    from server.verify import verify as train_again

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    opened = Run.open(run)
    custom_code.announce(opened.config, *custom_code.TRAINED)
    verified = train_again(opened, round, device)
    if json_:
        typer.echo(json.dumps(asdict(verified)))
    if verified.differs:
        raise RunFailed(
            f"{run}: trained again from round {verified.start}, round {verified.differs} differs: "
            f"logged {verified.logged[:16]}, found {verified.found[:16]}"
        )
    if not json_:
        typer.echo(
            f"round {verified.round}: trained again from round {verified.start}, equal, digest {verified.found[:16]}"
        )
