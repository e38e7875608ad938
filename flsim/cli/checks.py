"""`flsim evaluate`, `quantize` and `verify`: measurement of checkpoints, and verification of rounds."""

import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flsim.base.errors import InputError, RunFailed
from flsim.base.progress import say
from flsim.cli.options import Json, TorchDevice, check_device, given
from flsim.measures.built_in import ALSO

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from flsim.canaries.spec import Canary
    from flsim.data.records import Layout, Users, Vocabulary
    from flsim.measures.quantity import Quantity
    from flsim.results.rows import Row, RunResults
    from flsim.runs.elsewhere import CanariesElsewhere
    from flsim.runs.evaluate import EvaluationHParams

    Words = tuple[Layout, Vocabulary | None, Users | None, Path | None]
    Measured = tuple[list[Row], Sequence[Canary], EvaluationHParams]

OF_RUN, OF_MODEL, MEASURES = "A checkpoint of a run", "Any other model (--model)", "Measurements"
for_model = partial(typer.Option, rich_help_panel=OF_MODEL)
for_measures = partial(typer.Option, rich_help_panel=MEASURES)


def evaluate(
    checkpoint: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    run: Annotated[
        Path | None, typer.Option("--run", show_default="the folder above CHECKPOINT's", rich_help_panel=OF_RUN)
    ] = None,
    calibrate: Annotated[
        list[Path] | None, typer.Option(show_default="no calibrated exposure", rich_help_panel=OF_RUN)
    ] = None,
    model: Annotated[str | None, for_model(metavar="FACTORY")] = None,
    set_: Annotated[list[str] | None, for_model("--set", metavar="NAME=VALUE")] = None,
    state: Annotated[Path | None, for_model(show_default="weights that the function loads")] = None,
    context: Annotated[int | None, for_model(show_default="none")] = None,
    round: Annotated[int | None, for_model(show_default="that in its name, or 0")] = None,
    out: Annotated[Path | None, for_model(show_default="stores nothing")] = None,
    name: Annotated[str | None, for_model(show_default="that of --model")] = None,
    canaries: Annotated[Path | None, for_model()] = None,
    corpus: Annotated[str | None, for_model(metavar="CORPUS")] = None,
    vocabulary: Annotated[str | None, for_model()] = None,
    layout: Annotated[str, for_model()] = "tff",
    references: Annotated[int | None, for_model(show_default="2000000")] = None,
    prefix: Annotated[int | None, for_model(show_default="1, or that of the folder of canaries")] = None,
    beam_width: Annotated[int | None, for_model(show_default="5")] = None,
    test_users: Annotated[int | None, for_model(show_default="all")] = None,
    seed: Annotated[int | None, for_model(show_default="0, or that of the folder of canaries")] = None,
    decide: Annotated[bool, for_measures("--decide")] = False,
    also: Annotated[
        list[str] | None,
        for_measures(
            metavar="MEASURE",
            help="Further measure; repeatable: "
            + ", ".join(f"{name} ({measure.description})" for name, measure in ALSO.items())
            + ", or a custom measure as path/to/file.py:NAME; flsim executes the file.",
        ),
    ] = None,
    samples: Annotated[int | None, for_measures(show_default="5000")] = None,
    nodes: Annotated[int | None, for_measures(show_default="20000")] = None,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Measure which canaries a model memorized.

    Measures a checkpoint with the evaluation settings of its run, and stores the results in the run folder.

    Any other model needs --model and --canaries, and --corpus or --vocabulary unless --canaries is a folder. With --out
    the results are stored as a run folder of measurements; otherwise they are not stored. See docs/auditing.md for an
    example with a Transformer.

    Example: flsim evaluate runs/demo/iid

    Example: flsim evaluate runs/demo/iid/checkpoints/round-000200.safetensors

    Example: flsim evaluate CHECKPOINT --also space --calibrate OTHER_CHECKPOINT

    Example: flsim evaluate --model my.py:load --canaries my.csv --vocabulary words.txt

    Example: flsim evaluate --model my.py:Net --state checkpoints --canaries planted --out runs/theirs

    Args:
        checkpoint: Checkpoint of a run, or a run folder for its newest checkpoint; omit it with --model.
        run: Run folder of the checkpoint, e.g. runs/iid.
        calibrate: Checkpoint of a run without these canaries, whose scores are subtracted; repeatable. With base, the
            model before training of architecture "hf".
        model: Function or class that returns the model, e.g. model.py:load or package.module:load; it must load the
            weights unless --state names them. The file is executed: use only code that you trust. Or a folder of a
            Hugging Face model or adapter, or of several named by rounds.
        set_: Argument for the function of --model, e.g. width=48; repeatable.
        state: State dict to load into the model: .pt, .safetensors, or .npz of a Flower server; or a folder of them,
            whose names have the rounds, e.g. round-10.pt.
        context: Tokens that the model reads, e.g. 32, if it is a module without methods start and step.
        round: Round of the model, e.g. 100.
        out: Folder for the measurements, e.g. runs/theirs, which table, plot, audit and others read; more rounds are
            added.
        name: With --out: name of the model in tables.
        canaries: Folder that flsim data canaries wrote; or file of canaries, .csv or .json, with id, words or tokens,
            copies (required with --out), and if known p_u and p_e.
        corpus: Folder or URI of a corpus with the model's vocabulary; its test users measure utility.
        vocabulary: In place of --corpus: file with one word per line in the order of ids, or the number of token ids,
            e.g. 10004.
        layout: With --vocabulary: numbering of special tokens and words, as in tff, fedjax or fedml.
        references: Number of references to rank each canary against, |R|.
        prefix: Number of words of a canary that the attacker knows.
        beam_width: Number of phrases that beam search keeps at each step.
        test_users: Number of test users to measure accuracy and perplexity on, e.g. 100.
        seed: Seed of the references and the test users.
        decide: Measure only whether each canary is memorized, not its rank. Much faster.
        samples: With --also space or generation: number of sequences to draw.
        nodes: With --also space or path: largest number of prefixes that a search reads.
    """
    from flsim.results.rows import frame
    from flsim.runs.config.toml import override_value
    from flsim.runs.elsewhere import OtherModel, measure
    from flsim.runs.evaluate import EvaluationHParams, own_quantities
    from flsim.show.table import json_rows, note

    if (checkpoint is None) == (model is None):
        raise InputError("name either a checkpoint of a run or a --model")
    how: dict[str, Any] = {
        "references": references,
        "prefix": prefix,
        "beam_width": beam_width,
        "test_users": test_users,
    }
    how |= {"decide": decide or None, "also": tuple(also or ()) or None, "samples": samples, "nodes": nodes}
    settings: dict[str, Any] = {option: value for option, value in how.items() if value is not None}
    if checkpoint is not None:
        if named := given(OF_MODEL):
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
        rows = measure(other, known, hparams, at, device, test, out, name)
        measured = known.planting.canaries
    if as_json:
        typer.echo(json.dumps(json_rows(frame(rows))))
        return
    own = own_quantities(hparams.also)
    is_one = len({row.round for row in rows}) == 1
    text = to_text(rows, measured, own) if is_one else rounds_to_text(rows, known, name or other.label, own)
    if out is not None:
        text += note(f"Stored in {out}. flsim trace shows all rounds, and flsim canaries the canaries of a round.")
    typer.echo(text, nl=False)


def _of_run(
    checkpoint: Path, folder: Path | None, device: str, calibrate: "Sequence[Path]", changes: dict[str, Any]
) -> "Measured":
    from flsim.data.corpus import Corpus
    from flsim.runs.folder import Run, evaluate_where_writable, newest_checkpoint

    if checkpoint.is_dir():
        checkpoint = newest_checkpoint(Run.open(checkpoint).path)
        say(f"newest checkpoint: {checkpoint}")
    if not checkpoint.is_file():
        raise InputError(f"{checkpoint}: no such checkpoint")
    folder = folder or checkpoint.resolve().parent.parent
    run = Run.open(folder)
    Corpus.open(run.config.data.corpus, verify=True)
    rows = evaluate_where_writable(folder, checkpoint, device, calibrate, **changes)
    say(f"stored in {folder}, with the other evaluations of the run")
    return rows, run.canaries, replace(run.config.evaluation, **changes)


def _canaries(
    path: Path, corpus: str | None, vocabulary: str | None, layout: str
) -> "tuple[CanariesElsewhere, Users | None]":
    """Return the canaries of a folder or a list, and the test users of a corpus."""
    from flsim.canaries.elsewhere import CanarySet
    from flsim.canaries.planting import read_listed
    from flsim.runs.elsewhere import CanariesElsewhere

    if not path.is_dir():
        of_tokens, words, test, tokens = _words(corpus, vocabulary, layout)
        listed = CanariesElsewhere.listed(read_listed(path, of_tokens, words), words, of_tokens)
        return replace(listed, tokens=tokens, are_of_model=corpus is not None), test
    if vocabulary is not None:
        raise InputError(f"--vocabulary: {path} has words of its own; remove the option")
    drawn = CanarySet.read(path)
    if corpus is None:
        return CanariesElsewhere.of_folder(drawn, path), None
    of_tokens, words, test, _ = _words(corpus, None, layout)
    if words is None or (words.words, words.layout) != (drawn.words.vocabulary.words, drawn.words.layout.name):
        raise InputError(f"--corpus {corpus}: has other words than {path}; name one with its words, or remove it")
    return replace(CanariesElsewhere.of_folder(drawn, path), layout=of_tokens, are_of_model=True), test


def _words(corpus: str | None, vocabulary: str | None, layout: str) -> "Words":
    """Return the layout; the words, the test users, and the file of a model's ids of its tokens, or None for each."""
    from flsim.canaries.elsewhere import WordList
    from flsim.data.corpus import Corpus
    from flsim.data.records import Layout
    from flsim.data.tokenizer import TABLE

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


def _results(rows: "Sequence[Row]", roster: "pd.DataFrame", own: "Sequence[Quantity]") -> "RunResults":
    from flsim.results.rows import RunResults, frame

    custom, last = {quantity.name: quantity for quantity in own}, max(row.round for row in rows)
    return RunResults(rows[0].run, "", "completed", None, last, last, frame(rows), roster, own=custom)


def to_text(rows: "Sequence[Row]", canaries: "Sequence[Canary]", own: "Sequence[Quantity]" = ()) -> str:
    """Return the table of `flsim canaries` for the rows of one evaluation, then lines for the model."""
    import pandas as pd

    from flsim.measures.built_in import QUANTITIES
    from flsim.measures.quantity import of_model
    from flsim.results.tables import canary_table
    from flsim.show.memorization import table_of_canaries
    from flsim.show.table import note

    listed = sorted(canaries, key=lambda canary: canary.id)
    roster = pd.DataFrame([(one.id, one.p_u, one.p_e) for one in listed], columns=["canary", "p_u", "p_e"])
    results, at = _results(rows, roster, own), rows[0].round
    text = table_of_canaries(canary_table(results)).markdown() if listed else ""
    references, numbers = results.references(at) or 0.0, list[str]()
    text += note(f"Ranks are among {references:,.0f} references; at most {math.log2(references + 1):.1f} bits.")
    for quantity in of_model((*QUANTITIES.values(), *own)):
        value = results.of_model(quantity.name, at)
        if value is not None and (quantity.is_standard or quantity in own):
            shown = quantity.format.format(value * quantity.scale) + "%" * quantity.is_percentage
            about = "" if quantity.is_standard else f": {quantity.sentence}"
            numbers.append(f"{quantity.title} {shown}{about}")
    if whole := results.whole_test_users(at):
        numbers.append(f"Test text of {whole:,.0f} complete test authors")
    return text + "".join(map(note, numbers))


def rounds_to_text(
    rows: "Sequence[Row]", canaries: "CanariesElsewhere", name: str, own: "Sequence[Quantity]" = ()
) -> str:
    """Return the table of `flsim table` with a row for each evaluation of the model of this name."""
    import pandas as pd

    from flsim.canaries.population import roster_of
    from flsim.results.tables import memorization_table
    from flsim.show.memorization import table_of_runs

    roster = roster_of(canaries.planting, canaries.vocabulary)
    is_planted = ~roster["canary"].isin([canary.id for canary in canaries.controls])
    # A listed canary has at least one copy unless it is a control, even if the number is unknown.
    copies = roster["planned_insertions"].clip(lower=1).where(is_planted, 0)
    roster = roster.assign(is_planted=is_planted, planned_insertions=copies)
    results = _results(rows, roster, own)
    tables = [memorization_table([results], at).assign(setting=f"{name}, round {at:,}") for at in results.evaluated]
    # The names of rows have the rounds, so no column has them.
    return table_of_runs(pd.concat(tables, ignore_index=True).assign(round=results.rounds)).markdown()


def quantize(
    run: Annotated[Path, typer.Argument()],
    out: Annotated[Path, typer.Option()],
    bits: Annotated[int, typer.Option()] = 8,
    device: TorchDevice = "cpu",
) -> None:
    """Measure a run again with weights of few bits.

    Rounds the weights of the evaluated checkpoints, measures the rounded models as a new run, and prints both runs.

    The authors of The Secret Sharer (appendix D.3) tried this defence, and memorization did not change.

    Example: flsim quantize runs/iid --out runs/iid-8bit

    Args:
        run: Folder of a run with evaluated checkpoints, e.g. runs/iid.
        out: New run folder for the rounded checkpoints, e.g. runs/iid-8bit.
        bits: Bits of each weight; 8 bits allow 256 values in a tensor.
    """
    from flsim.cli.results import table
    from flsim.runs.folder import quantize_run

    quantize_run(run, out, bits, device)
    table([run, out])


def export(
    run: Annotated[Path, typer.Argument()],
    out: Annotated[Path, typer.Option()],
    round: Annotated[int | None, typer.Option(show_default="the last")] = None,
    merge: Annotated[bool, typer.Option("--merge")] = False,
) -> None:
    """Write a Hugging Face model that peft or transformers loads.

    Adapters become a folder for peft.PeftModel.from_pretrained. With --merge, and for runs without adapters, the folder
    is a complete model for transformers.AutoModelForCausalLM.from_pretrained.

    Example: flsim export runs/lora --out adapter

    Example: flsim export runs/lora --round 100 --merge --out model

    Args:
        run: Folder of a run of architecture "hf", e.g. runs/lora.
        out: New folder for the model, e.g. exported.
        round: Round of the checkpoint; of central training, a step.
        merge: Add the adapters to the base: a complete model.
    """
    from flsim.runs.folder import export_network

    export_network(run, out, round, merge)


def verify(
    run: Annotated[Path, typer.Argument()],
    round: Annotated[int | None, typer.Option(show_default="the last")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", callback=check_device, show_default="cuda if torch finds a GPU")
    ] = None,
    json_: Json = False,
) -> None:
    """Train a round again, and compare the result with the log.

    Training starts at the checkpoint before the round. The states after each round must be equal bit for bit.

    The exit code is 1 if they differ: the run was trained on another kind of machine, with other code, or incorrectly.

    Example: flsim verify runs/iid

    Example: flsim verify runs/iid --round 120

    Args:
        run: Run folder, e.g. runs/iid.
        round: Logged round to train again, e.g. 120; for central training, a logged step.
        device: Device for torch, cpu or cuda; it must be the device of the clients.
    """
    import torch

    from flsim.runs.config import custom_code
    from flsim.runs.folder import Run
    from server.launch import verify as train_again

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
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
