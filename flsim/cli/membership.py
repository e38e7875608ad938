"""`flsim membership`: which records of a run's users an attacker tells from records of others."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flsim.base.errors import InputError
from flsim.cli.options import Json, TorchDevice, check_device
from flsim.cli.results import RUNS, WHEN

EPILOG = """Example: flsim membership runs/demo/iid runs/demo/non-iid

Example: flsim membership runs/demo/non-iid --attack loss --attack min-k++ --records 5000 --json

Example: flsim membership runs/demo/non-iid --attack my_attack.py:rarest

Example: flsim membership runs/holdout --unit user

Example: flsim membership runs/membership-smoke --unit user --over-seeds"""


class Unit(StrEnum):
    """The unit whose membership is attacked."""

    record = "record"
    user = "user"


ATTACKS = "loss, reference, zlib, min-k, min-k++, neighbourhood, gradient, quantile, blind"


def membership(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTACK",
            help=f"Attack; repeatable: {ATTACKS}, or your own as path/to/file.py:NAME, a file that is executed.",
            show_default="all built-in attacks",
        ),
    ] = None,
    unit: Annotated[
        Unit,
        typer.Option(help="Whose membership: of each record, or of each user by records that no training read."),
    ] = Unit.record,
    records: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Largest number of members, and of non-members, e.g. 5000.",
        ),
    ] = 1_000,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="For the attack reference, and --unit user: checkpoint of a run on another corpus with the same "
            "vocabulary.",
            show_default="frequency of single words",
        ),
    ] = None,
    shadows: Annotated[
        bool,
        typer.Option(
            "--shadows",
            help="Attack each run with the others as shadow models, by LiRA and RMIA; the runs have data.shadow.",
        ),
    ] = False,
    by_setting: Annotated[
        bool,
        typer.Option("--over-seeds", help="One row for each setting, with means and intervals over its seeds."),
    ] = False,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the claim, e.g. 1e-6.", show_default="that of each run")
    ] = None,
    round: Annotated[
        int | None,
        typer.Option(
            help="Round of the attacked checkpoint, e.g. 100.",
            show_default="the newest of each run",
            rich_help_panel=WHEN,
        ),
    ] = None,
    device: TorchDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Attack membership: tell training records or users from others.

    Members are records of training users that took part. Non-members are records of authors who are held out, in pairs
    of equal length. With --unit user, members are users who took part, told by records of theirs that no training read
    (data.user_holdout). Prints how well each attack tells them apart, beside controls, and stores that in the run
    folder.
    """
    from flsim.attacks.membership.attacked import AttackHParams
    from flsim.attacks.membership.inference import attack_run
    from flsim.attacks.membership.tables import means_over_seeds, means_to_text, to_text
    from flsim.attacks.membership.users import attack_users
    from flsim.results.sweeps import expanded, over_runs, run_folders
    from flsim.show.table import json_rows

    check_device(device)
    if shadows:
        if by_setting:
            raise InputError("--over-seeds: shadow models of a setting are its seeds already; remove it or --shadows")
        _by_shadows(run_folders(expanded(runs)), records, round, device, as_json)
        return
    if unit is Unit.user and attack:
        raise InputError(f"--attack {attack[0]}: attacks are on records, and users have one; remove it or --unit user")

    hparams = AttackHParams(records, round, reference, delta, device)
    is_of_users = unit is Unit.user
    results = over_runs(
        runs, lambda path: attack_users(path, hparams) if is_of_users else attack_run(path, attack or (), hparams)
    )
    if by_setting:
        means = means_over_seeds(results)
        typer.echo(json.dumps(json_rows(means), indent=2) if as_json else means_to_text(means), nl=as_json)
    elif as_json:
        objects = [{"folder": str(path)} | attacked.to_json() for path, attacked in results.items()]
        typer.echo(json.dumps({"runs": objects}, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(to_text(path.resolve().name, attacked) for path, attacked in results.items()), nl=False)


def _by_shadows(runs: list[Path], count: int, round: int | None, device: str, as_json: bool) -> None:
    from flsim.attacks.membership.attacked import AttackHParams
    from flsim.attacks.membership.shadows import by_setting
    from flsim.attacks.membership.tables import shadows_to_text
    from flsim.show.table import json_rows

    results = by_setting(runs, AttackHParams(count, round, device=device))
    if as_json:
        objects = [
            {"setting": setting, "attacks": json_rows(attacks), "targets": json_rows(targets)}
            for setting, attacks, targets in results
        ]
        typer.echo(json.dumps({"shadows": objects}, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(shadows_to_text(*result) for result in results), nl=False)
