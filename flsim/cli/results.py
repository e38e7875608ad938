"""`flsim table`, `plot`, `compare`, `trace`, `canaries` and `report`: results of runs, for people and for files."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flsim.base.errors import InputError
from flsim.cli import options

if TYPE_CHECKING:
    from flsim.results.differences import Comparison
    from flsim.show.table import Table

    Compared = tuple[Table, str, dict[str, Any]]  # the differences; the text with all explanations; an object of JSON

of_seeds = partial(
    typer.Option,
    "--over-seeds/--each-seed",
    help="Average runs that differ only in the seed, with 95% intervals over seeds; or show each run.",
)

Kind = Literal["rounds", "utility", "loss"]
Against = Literal["paper"]


def table(
    runs: Annotated[list[Path], typer.Argument(help=options.RUNS)],
    format: options.FormatOption = "md",
    out: options.TableOut = None,
    round: options.Round = None,
    epoch: options.Epoch = None,
    over_seeds: Annotated[
        bool | None, of_seeds(show_default="over seeds if a setting has two; csv and parquet: each run")
    ] = None,
    against: Annotated[Against | None, typer.Option(show_default="no comparison")] = None,
) -> None:
    """Print a table of what runs memorized.

    The columns are those of Thakkar et al. (2020): RS counts the canaries that Random Sampling extracts, and BS
    those that Beam Search extracts. For runs of a sweep, published values are printed next to the measured values.

    If a setting has two or more seeds, the table shows means with intervals over seeds. A paired test compares IID with
    non-IID, at the end of training and at equal perplexity. P-values of several settings are also corrected for the
    number of settings (Holm). --each-seed shows a row for each run instead, as CSV and Parquet do.

    Example: flsim table runs/iid runs/non-iid --format csv

    Example: flsim table runs/sgd runs/fedavg --epoch 10

    Example: flsim table runs/seed-* --epoch 10

    Example: flsim table runs/seed-* --each-seed

    Example: flsim table runs/table1-smoke --against paper --format latex

    Args:
        against: For the runs of a sweep: show whether each value agrees with the published value.
    """
    from flsim.base.progress import say
    from flsim.results.published import against as marked
    from flsim.results.sweeps import expanded, has_means, published_of, read_shown, tuned_notes
    from flsim.results.tables import memorization_table
    from flsim.show.differences import compare_partitions
    from flsim.show.memorization import TUNED, table_of_runs
    from flsim.show.table import note

    options.refuse_wrong_output(format, out)
    runs = expanded(runs)
    rows = published_of(runs)
    if against and not rows:
        raise InputError("--against paper: no run has a published row; name the folder of a sweep")
    by_folder = read_shown(runs)
    read = list(by_folder.values())
    published = {run: rows[folder] for folder, run in by_folder.items() if folder in rows}
    why = None
    if over_seeds is None and format in {"md", "latex"}:
        over_seeds, why = has_means(read, round, epoch)
    results = memorization_table(read, round, epoch, published, by="series" if over_seeds else "run")
    if against:
        results = marked(results)
    if notes := tuned_notes(runs):
        results.attrs[TUNED] = notes
        for sentence in notes if format == "csv" else ():
            say(sentence)  # below a table that is too wide for the note
    shown, below = table_of_runs(results), [note(f"No means over seeds: {why}.")] if why else []
    if over_seeds and format == "md":
        below.append(compare_partitions(read, round, epoch))
    options.write_table(shown, format, out, "\n".join(filter(None, [shown.markdown(), *below])))


def plot(
    runs: Annotated[list[Path], typer.Argument(help=options.RUNS)],
    out: Annotated[Path, typer.Option(callback=options.check_figure)],
    kind: Annotated[Kind, typer.Option(metavar="KIND")] = "rounds",
    over_seeds: Annotated[bool | None, of_seeds(show_default="over seeds if a setting has two")] = None,
) -> None:
    """Plot what runs memorized: over epochs, or against perplexity.

    The figure of --kind rounds, the default, shows mean exposure, perplexity, and the number of canaries that Random
    Sampling (RS) and Beam Search (BS) extract. The x axis shows rounds if the epochs of a run are unknown. utility
    shows mean exposure against perplexity: which runs memorize less at equal utility.

    loss shows training loss, test loss and exposure over epochs, as Figure 4 of The Secret Sharer (Carlini et al.,
    2018).

    If a setting has two or more seeds, a line is their mean, and bands are 95% intervals over seeds. Otherwise a line
    is a run, and the band of mean exposure is a 95% interval over canaries.

    Example: flsim plot runs/iid runs/non-iid --out memorization.png

    Example: flsim plot runs/seed-* --each-seed --out memorization.svg

    Example: flsim plot runs/four-settings-demo --kind utility --out partitions.png

    Example: flsim plot runs/secret-sharer-figures-smoke --kind loss --out loss.png

    Args:
        out: File to write, .png, .svg or .pdf, e.g. plot.png; replaces an existing file.
        kind: Kind of the figure: rounds, utility or loss, e.g. utility.
    """
    from flsim.results.sweeps import expanded, read_shown
    from flsim.runs import roundlog
    from flsim.show.plots import plot as write_plot

    read = read_shown(expanded(runs))
    losses = {}
    if kind == "loss":
        losses = {run: roundlog.mean_losses(roundlog.read(folder), run.evaluated) for folder, run in read.items()}
    write_plot(list(read.values()), out, over_seeds, kind, losses)


def compare(
    a: Annotated[Path, typer.Argument()],
    b: Annotated[Path | None, typer.Argument(show_default="compares IID with non-IID in A")] = None,
    round: options.Round = None,
    epoch: options.Epoch = None,
    format: options.FormatOption = "md",
    as_json: options.Json = False,
    out: options.TableOut = None,
) -> None:
    """Compare two runs, the partitions of a sweep, or two sweeps.

    Compares exposure, extraction by Random Sampling (RS) and Beam Search (BS), and utility. Canaries are paired. Each
    difference has a 95% interval and a p-value. Exposure is also compared at the lowest perplexity that both runs
    reached. For two runs without canaries, only utility is compared.

    Two runs: differences over all canaries, and for each configuration (p_u, p_e); and side by side, the audits of
    their canaries and the stored results of `flsim membership`.

    Sweeps: a row for each pair of settings, over seeds, or over canaries if there is only one seed. P-values of several
    rows are corrected for the number of rows (Holm), also at equal perplexity.

    Example: flsim compare runs/iid runs/non-iid --epoch 10

    Example: flsim compare runs/table1-smoke

    Example: flsim compare runs/plain runs/clipped --format csv

    Args:
        a: Run folder or sweep folder, e.g. runs/iid.
        b: Second run folder or sweep folder, e.g. runs/non-iid.
    """
    from flsim.base.progress import say
    from flsim.results.differences import compare_folders
    from flsim.results.sweeps import expanded, tuned_notes
    from flsim.show.table import note

    options.refuse_wrong_output(format, out, as_json)
    a, b = _two(expanded([a]), None if b is None else expanded([b]))
    paths = [path for path in (a, b) if path is not None]
    compared = compare_folders(a, b, round, epoch)
    table, text, as_object = _compared_sweeps(a, b, compared) if compared.pairs else _compared_runs(compared)
    notes = tuned_notes(paths)
    for sentence in notes if format == "csv" else ():
        say(sentence)  # below a table that is too wide for the note
    text = "\n".join([text, *map(note, notes)])
    if as_json:
        text = json.dumps(as_object | {"tuned": notes}, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    options.write_table(replace(table, remarks="".join(map(note, notes))), format, out, text)


def _compared_runs(compared: "Comparison") -> "Compared":
    from flsim.show.differences import runs_to_markdown, table_of_two_runs
    from flsim.show.table import json_rows

    sides = dict(zip("ab", json_rows(compared.models), strict=True))
    shown = {"compared": "runs"} | sides | {"rows": json_rows(compared.table)}
    return table_of_two_runs(compared), runs_to_markdown(compared), shown


def _compared_sweeps(a: Path, b: Path | None, compared: "Comparison") -> "Compared":
    from flsim.show.differences import table_of_pairs
    from flsim.show.table import json_rows, note

    sides = {"compared": "sweeps", "a": str(a), "b": str(b)}
    metadata = {"compared": "partitions", "a": "IID", "b": "non-IID"} if b is None else sides
    table = table_of_pairs(compared.table, compared.pairs)
    return table, f"{note(compared.heading)}\n{table.markdown()}", {**metadata, "rows": json_rows(compared.table)}


def _two(first: list[Path], second: list[Path] | None) -> tuple[Path, Path | None]:
    """Return the folders to compare; a folder with two runs, such as that of a demo, means both."""
    if second is None and len(first) == 2:
        return first[0], first[1]
    for named in (first, second or []):
        if len(named) > 1:
            raise InputError(f"{named[0].parent}: has {len(named)} runs; name the two runs to compare, e.g. {named[0]}")
    return first[0], second[0] if second else None


def trace(
    run: Annotated[Path, typer.Argument()],
    canary: Annotated[list[str] | None, typer.Option(show_default="all canaries")] = None,
    out: Annotated[Path | None, typer.Option(callback=options.check_figure, show_default="no figure")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    as_csv: Annotated[bool, typer.Option("--csv")] = False,
) -> None:
    """Print the exposure of each canary over rounds.

    Also prints the rounds in which a sharer of the canary was in the cohort, or for central training the steps that
    read a copy. flsim recomputes the rounds from the seed, therefore the command works for every run, also during
    training. For a model that was trained elsewhere, the rounds are unknown.

    Example: flsim trace runs/demo/iid --canary c07 --canary c31 --out trace.png

    Example: flsim trace runs/demo/iid --csv > trace.csv

    Args:
        run: Run folder, e.g. runs/demo/iid.
        canary: Id of a canary, e.g. c07; repeatable.
        out: Figure to write in place of the text, .png, .svg or .pdf, e.g. trace.png; replaces an existing file.
        as_json: Print a JSON list instead of text.
        as_csv: Print CSV instead of text.
    """
    options.refuse_json_and_csv(as_json, as_csv)
    from flsim.results.rows import read_run
    from flsim.results.tables import trace as traced
    from flsim.runs import roundlog
    from flsim.runs.folder import Run, participation
    from flsim.show import trace as traces
    from flsim.show.figure import write_figure
    from flsim.show.table import json_rows

    results = read_run(run)
    took_part = None if results.is_elsewhere else participation(Run.open(run), results.evaluation())
    table = traced(results, took_part, canary or ())
    if out is not None:
        write_figure(lambda: traces.draw_trace(results, table), out)
    if as_json:
        typer.echo(json.dumps(json_rows(table)))
    elif out is not None and not as_csv:
        counts = f"canaries: {table['canary'].nunique():,}; evaluations: {table['round'].nunique():,}"
        typer.echo(f"The figure is {out} ({counts}). Without --out, the command prints a row for each.")
    else:
        steps = [line["effective_step"] for line in roundlog.read(run) if line.get("effective_step") is not None]
        text = traces.to_text(table, results) + traces.steps_to_text(steps)
        typer.echo(traces.to_csv(table) if as_csv else text, nl=False)


def report(paths: Annotated[list[Path], typer.Argument()], out: Annotated[Path, typer.Option()]) -> None:
    """Write one HTML file about runs or a sweep.

    The file has tables, figures, settings, data, privacy and provenance. The file loads no other files, needs no
    scripts, and can be printed.

    The report marks runs that are unfinished, diverged or failed.

    Example: flsim report runs/table1-smoke --out table1.html

    Example: flsim report runs/iid runs/non-iid --out partitions.html

    Args:
        paths: Run folders and sweep folders, e.g. runs/iid runs/non-iid.
        out: File to write, .html, e.g. table1.html; replaces an existing file. /dev/stdout prints.
    """
    from flsim.report.page import write_report
    from flsim.results.sweeps import expanded

    write_report(expanded(paths), out)


def canaries(
    run: Annotated[Path, typer.Argument()],
    round: options.Round = None,
    epoch: options.Epoch = None,
    written: Annotated[bool, typer.Option("--written")] = False,
    device: options.TorchDevice = "cpu",
    format: options.FormatOption = "md",
    out: options.TableOut = None,
) -> None:
    """List the canaries of a run, and whether they were memorized.

    Each row has the phrase, its sharers and copies, its rank and exposure, and whether it was extracted.

    Example: flsim canaries runs/demo/iid --written

    Example: flsim canaries runs/iid --epoch 10 --format csv --out canaries.csv

    Args:
        run: Run folder, e.g. runs/iid.
        written: Also show the phrase that Beam Search generates with the checkpoint.
    """
    from flsim.results.rows import read_run, refuse_two_points
    from flsim.results.tables import canary_table
    from flsim.show.memorization import table_of_canaries

    options.refuse_wrong_output(format, out)
    refuse_two_points(round, epoch)
    results = read_run(run)
    at = results.at(round, epoch)
    texts = None
    if written:
        from flsim.runs.config.custom_code import announce
        from flsim.runs.folder import Run, written_after

        opened = Run.open(run)
        announce(opened.config, "architecture")
        tokens = written_after(opened, at, device)
        texts = {canary: opened.corpus.vocabulary.text(ids) for canary, ids in tokens.items()}
    table = canary_table(results, at, written=texts)
    options.write_table(table_of_canaries(table), format, out)
