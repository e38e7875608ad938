"""`flsim demo`, `run`, `sweep`, `tune` and `settings`: the commands that train, and the list of settings."""

import re
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flsim.base.errors import InputError, RunFailed
from flsim.base.progress import say
from flsim.cli.options import Address, AtOnce, Overrides, of_machines

if TYPE_CHECKING:
    from flsim.runs.config.files import ListedSection

of_resume = partial(typer.Option, rich_help_panel="Continue a run")
TIER = "Tier of the sweep, which is its scale, e.g. paper. The sweep file defines the tiers."
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GRID", help="Grid of the file to train, e.g. fedavg; repeatable.", show_default="all grids"),
]


def seeds_of(text: str) -> range:
    """Return the seeds of a text: "5" means 0 to 4, and "5-9" means 5 to 9; typer.BadParameter for others."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if match is None:
        raise typer.BadParameter(f'"{text}" must be a number of seeds such as 5 or a range such as 5-9')
    seeds = range(int(match[1]), int(match[2]) + 1) if match[1] else range(int(match[2]))
    if not seeds:
        raise typer.BadParameter(f'"{text}" contains no seed; use a number such as 5 or a range such as 5-9')
    return seeds


Seeds = Annotated[
    range | None,
    typer.Option(
        parser=seeds_of,
        metavar="SEEDS",
        help="Number or range of seeds: 5 trains the seeds 0 to 4, and 5-9 trains the seeds 5 to 9.",
        show_default="the tier's seeds",
    ),
]
CorpusOption = Annotated[
    str | None,
    typer.Option(
        metavar="CORPUS",
        help="Folder or URI of the corpus to train on, e.g. corpora/mine.",
        show_default="the corpus that the file names",
    ),
]


def sweep(
    file: Annotated[Path, typer.Argument()],
    tier: Annotated[str, typer.Option(help=TIER)] = "smoke",
    out: Annotated[Path | None, typer.Option(show_default="runs/FILE-TIER")] = None,
    seeds: Seeds = None,
    only: Only = None,
    corpus: CorpusOption = None,
    set_: Overrides = None,
    address: Address = None,
    at_once: AtOnce = None,
) -> None:
    """Train all runs of a sweep file, and print their table.

    If there is a published table, its values are printed next to the measured values.

    Repeat the command to continue an interrupted sweep: finished runs are skipped, and failed runs are tried again. A
    failed run does not stop other runs. SIGTERM and Ctrl-C let runs write a checkpoint first.

    Also writes a report, report.html in the sweep folder.

    Example: flsim sweep experiments/table1.toml --tier smoke

    Example: flsim sweep experiments/table1.toml --tier smoke --seeds 5 --only fedavg --address auto

    Example: flsim sweep experiments/table1.toml --tier smoke --seeds 5-9 --out runs/table1-fresh

    Args:
        file: TOML file of a sweep, e.g. experiments/table1.toml.
        out: Sweep folder, e.g. runs/table1-smoke.
    """
    import flsim
    from flsim.cli.results import report, table
    from flsim.results.sweeps import published_of

    # The path is absolute, because processes of a running cluster have another working directory.
    folder = (out or Path("runs") / f"{file.stem}-{tier}").absolute()
    train, failure = partial(flsim.sweep, file, folder, tier=tier, seeds=seeds, corpus=corpus, address=address), None
    try:
        train(only=only or (), overrides=set_ or (), at_once=at_once)
    except RunFailed as error:
        failure = error
    if any(folder.glob("runs/*/run.json")):
        table([folder], against="paper" if published_of([folder]) else None)
        report([folder], folder / "report.html")
        say(f"Report: {folder / 'report.html'}")
    if failure:
        raise failure


def tune(
    file: Annotated[Path, typer.Argument()],
    tier: Annotated[str, typer.Option()] = "smoke",
    out: Annotated[Path | None, typer.Option(show_default="runs/FILE-TIER")] = None,
    address: Address = None,
    at_once: AtOnce = None,
) -> None:
    """Choose settings of a sweep by perplexity on test users.

    Searches settings such as learning rates, and compares utility only. Each group of runs, such as one optimizer on
    one partition, has the same trials on the same seeds. Canaries are planted as in the sweep, but are not measured.
    The search uses successive halving: the better half of the trials continues, until the last trials are complete. If
    the best value is at the edge of its range, the range is extended.

    Writes tuned.toml into the folder. To use the file, name it as `tuned` in a tier of the sweep. The sweep then
    refuses the seeds of the search.

    Repeat the command to continue an interrupted search.

    Example: flsim tune experiments/tune-table1.toml --tier smoke --out runs/tune-table1-smoke

    Args:
        file: TOML file of a search, e.g. experiments/tune-table1.toml.
        tier: Tier of the sweep to choose settings for, e.g. paper.
        out: Folder of the search, e.g. runs/tune-table1-smoke.
    """
    from flsim.runs.sweeps import folder
    from server.sweep import Tuner

    tuning_folder = folder.TuningFolder((out or Path("runs") / f"{file.stem}-{tier}").absolute())
    search = folder.load_search(file, tier, tuning_folder.path)
    search.groups()  # raises an error if the file does not fit the sweep
    known = folder.corpus_or_its_settings(search.tier, search.corpus, tuning_folder.path)
    folder.refuse_impossible_runs(search.typical(), known, is_trained_here=address is None)
    with tuning_folder.hold_lock():
        corpus = search.open_corpus(tuning_folder.path)
        tuned = Tuner(tuning_folder, search, corpus.split("train"), address, at_once).tune(corpus.digest)
    typer.echo(folder.tuned_to_text(tuned), nl=False)


def demo(
    out: Annotated[Path | None, typer.Option(show_default="runs/demo-DATE-TIME")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    set_: Overrides = None,
) -> None:
    """Train on a built-in corpus, and show what was memorized.

    Trains twice: on IID users and on non-IID users. Prints a table of both runs and a paired test on exposure. Plots
    perplexity, exposure, and how many canaries Random Sampling (RS) and Beam Search (BS) extract. Takes two to three
    minutes on two idle cores.

    Example: flsim demo --out runs/demo

    Args:
        out: New folder for the corpus, the runs and the results, e.g. runs/demo.
        seed: Seed of the corpus, the canaries and the training.
    """
    from dataclasses import replace
    from importlib import resources

    import flsim
    from flsim.base.files import refuse_existing
    from flsim.cli.results import plot, table
    from flsim.runs import config
    from flsim.show.differences import table_of_two_runs

    out = out or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    refuse_existing(out)
    corpus, iid, non_iid = (out / "corpus").resolve(), out / "iid", out / "non-iid"
    with resources.as_file(resources.files("experiments") / "demo.toml") as file:
        settings = config.load(file, [f"seed={seed}", *(set_ or ())])
    flsim.make_corpus(corpus, seed)
    for partition in ("iid", "non-iid"):
        data = replace(settings.data, corpus=corpus, partition=partition)
        flsim.run(replace(settings, data=data), out / partition)
    table([iid, non_iid], "csv", out / "table.csv")
    table([iid, non_iid], "md", out / "table.md")
    plot([iid, non_iid], out / "memorization.png")
    typer.echo((out / "table.md").read_text(encoding="utf-8"))
    typer.echo(table_of_two_runs(flsim.compare(iid, non_iid)).markdown())
    say(f"Plot: {out / 'memorization.png'}. Everything else: {out}.")


def run(
    config: Annotated[Path, typer.Argument()],
    out: Annotated[Path | None, typer.Option(show_default="runs/CONFIG")] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", show_default="as in CONFIG")] = None,
    set_: Overrides = None,
    address: Address = None,
    head: Annotated[str | None, of_machines(metavar="HOST:PORT")] = None,
    cpus: Annotated[int | None, of_machines(min=1, metavar="N", show_default="all")] = None,
    in_process: Annotated[bool, of_machines("--in-process")] = False,
    resume: Annotated[bool, of_resume("--resume")] = False,
    retrain_lost: Annotated[bool, of_resume("--retrain-lost")] = False,
    begin_from: Annotated[Path | None, of_resume(metavar="RUN")] = None,
) -> None:
    """Train one run on Ray, and print its table.

    Checkpoints are evaluated while training continues. The file defines whether training is federated (Flower on Ray)
    or central (training.kind = "central").

    SIGTERM and Ctrl-C write a checkpoint and end the run. With --resume, the run continues from the checkpoint, with
    the same result.

    Example: flsim run experiments/demo.toml --set data.partition=iid --out runs/iid

    Example: flsim run experiments/demo.toml --out runs/demo --resume

    Args:
        config: TOML file of the run, e.g. experiments/demo.toml.
        out: Run folder, e.g. runs/iid; a new folder, or with --resume an existing folder.
        seed: Seed of the run, as with --set seed=N.
        head: Address of this machine at which to start a Ray head that other machines join, e.g. 10.0.0.1:6379.
        cpus: CPU cores for the Ray that this command starts, e.g. 8.
        in_process: Train in this process, without Ray. Starts faster; the result is the same.
        resume: Continue the run in --out from its newest valid checkpoint.
        retrain_lost: With --resume: train the rounds again that are missing from rounds.jsonl.
        begin_from: Run of the other canaries.arm, e.g. runs/in. Training starts with a copy of its rounds before the
            first window.
    """
    import flsim
    from flsim.cli.results import table

    path = out or Path("runs") / config.stem
    flsim.run(
        config,
        path,
        overrides=[*(set_ or ()), *([] if seed is None else [f"seed={seed}"])],
        resume=resume,
        retrain_lost=retrain_lost,
        begin_from=begin_from,
        address=address,
        cpus=cpus,
        head=head,
        in_process=in_process,
    )
    table([path])


# `flsim settings`: list the settings of a configuration file.

WIDTH = 80
COLUMNS = (20, 16, 22)  # widths of key, type and default; the unit has the rest


def settings(section: Annotated[str | None, typer.Argument(show_default="all sections")] = None) -> None:
    """List the settings of a configuration file.

    Prints the type, default, unit and description of each setting. The list of section model also describes the
    built-in networks.

    Example: flsim settings model

    Example: flsim settings training.rounds

    Args:
        section: Section to list, e.g. model, or one setting, e.g. model.layers.
    """
    from flsim.runs.config.files import sections

    typer.echo("\n".join(_text(_selected(sections(), section))))


def _selected(listed: "list[ListedSection]", name: str | None) -> "list[ListedSection]":
    """Return the sections and settings of a name, with or without its section; InputError if there is none."""
    from dataclasses import replace

    from flsim.runs.config.toml import close_to

    if name is None:
        return listed
    chosen = [section for section in listed if section.name == name]
    for section in listed:
        named = tuple(setting for setting in section.settings if name in (section.key(setting), setting.name))
        chosen += [replace(section, settings=named)] if named else []
    if chosen:
        return chosen
    keys = {section.key(setting) for section in listed for setting in section.settings}
    names = {section.name for section in listed if section.name} | keys
    raise InputError(f"{name}: no such section or setting; {close_to(name, names)}")


def _text(listed: "list[ListedSection]") -> list[str]:
    lines: list[str] = []
    for section in listed:
        lines += [section.title, *_wrapped(section.description, 2), "", _row("Setting", "Type", "Default", "Unit")]
        for setting in section.settings:
            lines += [_row(setting.name, setting.type, setting.default, setting.unit)]
            lines += _wrapped(setting.description, 6)
        lines += [""]
    return lines[:-1]


def _row(*cells: str) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, COLUMNS, strict=False)]
    return f"  {' '.join([*padded, cells[-1]])}".rstrip()


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)
