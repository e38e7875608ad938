"""`flsim compare`: compare two runs, the partitions of a sweep, or two sweeps, with intervals and p-values."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flsim.base.errors import InputError
from flsim.cli.options import Format, FormatOption, Json, print_or_write, refuse_two_prints
from flsim.cli.results import Epoch, Round, TableOut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

EPILOG = """Example: flsim compare runs/iid runs/non-iid --epoch 10

Example: flsim compare runs/table1-smoke

Example: flsim compare runs/plain runs/clipped --format csv"""


def compare(
    a: Annotated[Path, typer.Argument(help="Run folder or sweep folder, e.g. runs/iid.")],
    b: Annotated[
        Path | None,
        typer.Argument(
            help="Second run folder or sweep folder, e.g. runs/non-iid.",
            show_default="compares IID with non-IID in A",
        ),
    ] = None,
    round: Round = None,
    epoch: Epoch = None,
    format: FormatOption = Format.md,
    as_json: Json = False,
    out: TableOut = None,
) -> None:
    """Compare two runs, the partitions of a sweep, or two sweeps.

    Compares exposure, extraction by Random Sampling (RS) and Beam Search (BS), and utility. Canaries are paired. Each
    difference has a 95% interval and a p-value. Exposure is also compared at the lowest perplexity that both runs
    reached. Two runs without canaries are compared in utility alone.

    Two runs: differences over all canaries, and for each configuration (p_u, p_e); and side by side, what their
    canaries prove about epsilon and how well stored attacks of flsim membership do.

    Sweeps: a row for each pair of settings, over seeds, or over canaries where there is only one seed. P-values of
    several rows are corrected for their number (Holm), those at equal perplexity too.
    """
    from flsim.base.progress import say
    from flsim.show import formats

    refuse_two_prints(format, out, as_json)
    table, texts, as_object = _compared(a, b, round, epoch)
    if format is Format.parquet and out is not None:
        formats.write_parquet(table, out)
        return
    for note in as_object["tuned"] if format is Format.csv else ():
        say(note)  # below a table that has no room for it
    text = json.dumps(as_object, indent=2, allow_nan=False, ensure_ascii=False) + "\n" if as_json else texts[format]
    print_or_write(text, out)


def _compared(
    a: Path, b: Path | None, round: int | None, epoch: float | None
) -> "tuple[pd.DataFrame, dict[Format, str], dict[str, Any]]":
    """Return a comparison as a data frame, as text in each format, and as a JSON object."""
    from flsim.attacks.membership import side_by_side
    from flsim.results.differences import compare_runs, differences, same_names, twins
    from flsim.results.store import read_run
    from flsim.results.sweeps import expanded, is_sweep, read_sweep, tuned_notes
    from flsim.show import formats
    from flsim.show.differences import runs_to_json, runs_to_latex, runs_to_markdown, table_of_pairs
    from flsim.show.table import json_rows

    a, b = _two(expanded([a]), None if b is None else expanded([b]))
    are_sweeps = [is_sweep(path) for path in (a, b) if path is not None]
    if not any(are_sweeps):
        first = read_run(a)
        if b is None:
            raise InputError(f"{a}: one run has nothing to be compared with; name another run, or a sweep folder")
        second = read_run(b)
        if first.identity is not None and (first.identity, first.rounds) == (second.identity, second.rounds):
            raise InputError(f"{a} and {b}: copies of one run, which have nothing to be compared; name another run")
        compared = compare_runs(first, second, round, epoch)
        proven = side_by_side.Proof.read(a, round, epoch), side_by_side.Proof.read(b, round, epoch)
        parts = [runs_to_markdown(compared), side_by_side.to_markdown(*proven)]
        texts = {
            Format.md: "\n".join(filter(None, parts)),
            Format.latex: runs_to_latex(compared),
            Format.csv: formats.to_csv(compared.table),
        }
        proof = {"proof": {"a": proven[0].to_json(), "b": proven[1].to_json()}}
        as_object = runs_to_json(compared) | proof
        return compared.table, *_with_notes(texts, as_object, tuned_notes([a, b]))
    if not all(are_sweeps):
        raise InputError(f"{a} and {b}: a run and a sweep do not compare; name two runs, a sweep, or two sweeps")
    if b is None:
        sweep = read_sweep(a)
        pairs = twins(sweep)
        heading = f"{sweep.heading}: IID (a) less non-IID (b)"
        about = {"compared": "partitions", "a": "IID", "b": "non-IID"}
    else:
        pairs = same_names(read_sweep(a), read_sweep(b))
        heading, about = f"{a} (a) less {b} (b)", {"compared": "sweeps", "a": str(a), "b": str(b)}
    table = differences(pairs, round, epoch)
    if not (table["quantity"] == "canaries").any():
        why = table["left_out"].dropna().iloc[0]
        raise InputError(f"{a}{'' if b is None else f' and {b}'}: nothing to compare: {why}")
    texts = {
        Format.md: f"{formats.note(heading)}\n{table_of_pairs(table, pairs).markdown()}",
        Format.latex: table_of_pairs(table, pairs).latex(),
        Format.csv: formats.to_csv(table),
    }
    notes = tuned_notes([a] if b is None else [a, b])
    return table, *_with_notes(texts, {**about, "rows": json_rows(table)}, notes)


def _with_notes(
    texts: "Mapping[Format, str]", as_object: "Mapping[str, Any]", notes: "Sequence[str]"
) -> tuple[dict[Format, str], dict[str, Any]]:
    """Return texts for people and a JSON object with the sentences on how settings were chosen; CSV has no room."""
    from flsim.show import formats, layout

    below = "".join(f"\n{formats.note(text)}" for text in notes)
    comments = "".join(f"% {line}\n" for text in notes for line in formats.note(text, layout.TERMINAL - 2).splitlines())
    added = {Format.md: texts[Format.md] + below, Format.latex: comments + texts[Format.latex]}
    return {**texts, **added}, {**as_object, "tuned": list(notes)}


def _two(first: list[Path], second: list[Path] | None) -> tuple[Path, Path | None]:
    """Return what is compared; a folder of two runs, such as that of a demo, stands for both."""
    if second is None and len(first) == 2:
        return first[0], first[1]
    for named in (first, second or []):
        if len(named) > 1:
            raise InputError(f"{named[0].parent}: holds {len(named)} runs; name the two to compare, e.g. {named[0]}")
    return first[0], second[0] if second else None
