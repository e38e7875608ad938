"""`flsim audit`: what the ranks of canaries prove about a run's privacy."""

from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import InputError
from flsim.cli.options import Format, Json, print_or_write, refuse_two_prints
from flsim.cli.results import RUNS, Epoch, Round, TableOut

EPILOG = """Example: flsim audit runs/demo/iid runs/demo/non-iid

Example: flsim audit runs/dp --delta 1e-6 --format csv --out audit.csv"""


def audit(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    threshold: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="RANK",
            help="Largest rank at which a canary counts as named; fix it before you look at ranks.",
            show_default="|R| / 1,000, and 100 from |R| = 100,000 on",
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the claim, e.g. 1e-6.", show_default="that of each run")
    ] = None,
    round: Round = None,
    epoch: Epoch = None,
    format: Annotated[Format, typer.Option(help="Format of the output: md, csv or parquet.")] = Format.md,
    out: TableOut = None,
    as_json: Json = False,
) -> None:
    """Say what a run's canaries prove about its privacy.

    Prints how many canaries an attacker finds at low false-positive rates, a lower bound on
    epsilon, and, for a run with noise, whether its ledger is contradicted. For canary users, it
    prints an estimate and a bound. It also tests the cohorts and the noise of the rounds against
    the ledger. The last line names what is missing, and the settings for that.
    """
    import json

    import pandas as pd

    from flsim.attacks.audit.audit import audit_subject, to_json, to_text
    from flsim.attacks.audit.subject import subject_of
    from flsim.base.progress import say
    from flsim.results.store import refuse_two_points
    from flsim.results.sweeps import over_runs
    from flsim.show import formats

    if format is Format.latex:
        raise InputError("--format latex: audits are md, csv or parquet; choose one of them")
    refuse_two_prints(format, out, as_json)
    refuse_two_points(round, epoch)
    subjects = over_runs(runs, lambda path: subject_of(path, round, epoch, delta)).values()
    pairs = [(subject, audit_subject(subject, threshold)) for subject in subjects]
    for subject, audited in pairs if format is not Format.md else []:
        if audited.frame.empty:
            say(f"run {subject.results.name}: has no row. {audited.notes[-1]}")
    rows = pd.concat([audited.frame for _, audited in pairs], ignore_index=True)
    if format is Format.parquet and out is not None:
        formats.write_parquet(rows, out)
        return
    text = (
        json.dumps({"runs": [to_json(*pair) for pair in pairs]}, indent=2) + "\n"
        if as_json
        else formats.to_csv(rows)
        if format is Format.csv
        else "\n".join(to_text(*pair) for pair in pairs)
    )
    print_or_write(text, out)
