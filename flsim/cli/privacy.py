"""`flsim privacy` and `flsim plan`: the epsilon of a plan or a run, and the resources of a plan."""

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flsim.base.errors import InputError
from flsim.base.extensions import restrict_custom_code
from flsim.base.progress import say
from flsim.cli.options import AtOnce, Json, Overrides, given, show
from flsim.cli.training import TIER, CorpusOption, Only, Seeds

if TYPE_CHECKING:
    from flsim.privacy.ledger import Unit
    from flsim.privacy.table import EpsilonLine
    from flsim.runs.folder import Run

OF_RECORDS = "Record-level: epsilon protects one record, not its author. Below, a user means a record."
BOTH = "both"  # fixed-size and poisson
INDEPENDENT = "independent"
OF_PLAN = "A plan, instead of RUN"
of_plan = partial(typer.Option, rich_help_panel=OF_PLAN)


def privacy(
    run: Annotated[Path | None, typer.Argument(show_default="describe a plan")] = None,
    users: Annotated[int | None, of_plan()] = None,
    cohort: Annotated[int | None, of_plan()] = None,
    rounds: Annotated[int | None, of_plan()] = None,
    noise_multiplier: Annotated[float | None, of_plan()] = None,
    epsilon: Annotated[float | None, of_plan()] = None,
    sampler: Annotated[str, of_plan()] = BOTH,
    sampler_option: Annotated[list[str] | None, of_plan(metavar="NAME=VALUE")] = None,
    noise: Annotated[str, of_plan()] = INDEPENDENT,
    noise_option: Annotated[list[str] | None, of_plan(metavar="NAME=VALUE")] = None,
    records_per_user: Annotated[int | None, of_plan(min=1)] = None,
    delta: Annotated[float | None, typer.Option(show_default="that of RUN; required for a plan")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compute the epsilon of a run or of a plan.

    Prints epsilon for each combination of sampler, relation between neighbouring data sets, and conversion.

    Federated runs protect users. Runs of central training protect records, and the output states this; with
    `data.max_records`, the last row is the epsilon of a user.

    Example: flsim privacy runs/dp

    Example: flsim privacy --users 392000 --cohort 5000 --rounds 7840 --noise-multiplier 1 --delta 1e-7

    Example: flsim privacy --users 9136 --cohort 800 --rounds 160 --epsilon 8 --delta 1e-5 --sampler min-separation
    --sampler-option separation=10 --noise blt --noise-option buffers=2

    Args:
        run: Folder of a run, for the epsilon that it spent so far.
        users: Training users, N, e.g. 392000.
        cohort: Number of users per round, e.g. 5000; with Poisson sampling the expected number.
        rounds: Number of rounds, e.g. 8000.
        noise_multiplier: Noise multiplier z, e.g. 1: standard deviation of the noise on the sum of updates, divided by
            the clip norm.
        epsilon: Instead of --noise-multiplier: the largest epsilon, e.g. 4. Prints the smallest sufficient z.
        sampler: Sampler of cohorts: a built-in sampler, both (fixed-size and poisson), or a custom sampler as
            path/to/file.py:NAME.
        sampler_option: An option of the sampler, as in training.sampler_options, e.g. separation=10. Can be repeated.
        noise: Noise process, as in privacy.noise, e.g. blt or path/to/file.py:NAME.
        noise_option: An option of the noise, as in privacy.noise_options, e.g. buffers=2. Can be repeated.
        records_per_user: Also plan DP-SGD over records with the same sampling probability, for users of at most this
            many records, e.g. 8.
        delta: Delta of (epsilon, delta)-privacy, e.g. 1e-7.
        as_json: Print a JSON list instead of a table.
    """
    from flsim.privacy.table import to_text

    unit: Unit
    plan = {"--users": users, "--cohort": cohort, "--rounds": rounds}
    aim = {"--noise-multiplier": noise_multiplier, "--epsilon": epsilon}
    if run is not None:
        if twice := given(OF_PLAN):
            raise InputError(
                f"{', '.join(twice)}: {run} stores these values; name a run, or describe a plan with options, not both"
            )
        lines, unit = _spent(run, delta)
    else:
        missing = [name for name, value in {**plan, "--delta": delta}.items() if value is None]
        if users is None or cohort is None or rounds is None or delta is None:
            raise InputError(f"{', '.join(missing)} missing; set all options of the plan, or name a run folder")
        if (noise_multiplier is None) == (epsilon is None):
            raise InputError(f"{' and '.join(aim)}: one value determines the other; set only one of them")
        if sampler == BOTH and sampler_option:
            raise InputError(f"--sampler-option {sampler_option[0]}: set --sampler, e.g. to poisson")
        names = _with_options(sampler, sampler_option), _with_options(noise, noise_option)
        lines = _planned(users, cohort, rounds, noise_multiplier, epsilon, delta, *names, records_per_user)
        unit = "user"
    head = f"{OF_RECORDS}\n" * (unit == "record")
    objects = [{"unit": unit} | line.to_json() for line in lines]
    show(lambda: objects, lambda: head + to_text(lines, calibration=epsilon is not None), as_json)


def _with_options(name: str, options: list[str] | None) -> str:
    """Return a name with options that are given as NAME=VALUE."""
    from flsim.base.extensions import with_options
    from flsim.runs.config.toml import override_value

    values: dict[str, object] = {}
    for option in options or ():
        known = len(values)
        override_value(values, option)
        if len(values) == known:
            raise InputError(f"{option}: this option is given twice; give it once")
    return with_options(name, values)


def _planned(
    users: int,
    cohort: int,
    rounds: int,
    noise_multiplier: float | None,
    epsilon: float | None,
    delta: float,
    sampler: str,
    noise: str,
    records: int | None,
) -> "list[EpsilonLine]":
    from flsim.base.extensions import options_of, refuse_unknown, without_options
    from flsim.privacy.ledger import Entry, Ledger, check_noise_multiplier
    from flsim.privacy.noise import NOISES, refuse_options, settled
    from flsim.privacy.sampling import Sampling
    from flsim.privacy.table import calibrated, report

    check_noise_multiplier(noise_multiplier or 0.0, "--noise-multiplier")
    refuse_unknown(noise, NOISES, "noise")
    refuse_options(without_options(noise), options_of(noise))
    if records is not None and (sampler not in (BOTH, "poisson") or noise != INDEPENDENT):
        raise InputError("--records-per-user needs --sampler poisson without options, and independent noise; remove it")
    lines = []
    for name in ("fixed-size", "poisson") if sampler == BOTH else (sampler,):
        entry = Entry(name, users, cohort, noise_multiplier or 0.0, rounds)  # raises for numbers out of range
        entry = replace(entry, noise=settled(noise, Sampling(name, users, cohort), rounds))
        capped = records if name == "poisson" else None
        lines += (
            report(Ledger((entry,)), delta, capped) if epsilon is None else calibrated(entry, epsilon, delta, capped)
        )
    _refuse_nothing(lines, epsilon)
    _warn(delta, users, "user")
    return lines


@restrict_custom_code()
def _spent(folder: Path, delta: float | None) -> "tuple[list[EpsilonLine], Unit]":
    from flsim.attacks.audit.claim import needs_custom_code
    from flsim.privacy.conventions import possible_conventions
    from flsim.privacy.table import NO_NOISE, EpsilonLine, report
    from flsim.runs.folder import Run, newest_checkpoint

    run = Run.open(folder)
    ledger = run.load(newest_checkpoint(folder), executes_code=False).ledger
    rounds, unit = ledger.rounds, run.config.unit
    is_noisy = all(entry.noise_multiplier for entry in ledger.entries)
    if needs_custom_code(ledger) and is_noisy:
        lines, rounds, delta = _stored(run, delta)
    else:
        delta = run.delta if delta is None else delta
        infinite = [EpsilonLine(one, math.inf, note=NO_NOISE) for one in possible_conventions(run.config.sampler)]
        records = run.config.data.max_records if unit == "record" else None
        lines = infinite if needs_custom_code(ledger) else report(ledger, delta, records)
    _refuse_nothing(lines)
    say(f"{folder}: {rounds:,} {'rounds' if unit == 'user' else 'steps'}, delta {delta:.3g}")
    _warn(delta, ledger.entries[0].population, unit)
    return lines, unit


def _stored(run: "Run", delta: float | None) -> "tuple[list[EpsilonLine], int, float]":
    """Return the stored privacy of the last evaluation, its round and its delta, for ledgers that need custom code."""
    from flsim.attacks.audit.claim import stored_epsilons
    from flsim.privacy.table import NO_NOISE, EpsilonLine
    from flsim.results.rows import read_run

    results = read_run(run.path)
    round_ = results.evaluation()
    spent, stored = stored_epsilons(results, round_, run.config.sampler, run.config.unit)
    if not spent or stored is None:
        raise InputError(
            f"{run.path}: round {round_} has no stored epsilon, and this command does not execute "
            f"the run's custom sampler or noise; run `flsim evaluate {run.path}` first"
        )
    if delta not in (None, stored):
        raise InputError(
            f"--delta {delta:g}: the epsilon of {run.path} is stored only at delta {stored:g}, and "
            f"this command does not execute its custom sampler or noise; omit --delta, or "
            f"describe the plan with --sampler"
        )
    lines = [EpsilonLine(one, value, note=None if math.isfinite(value) else NO_NOISE) for one, value in spent.items()]
    return lines, round_, stored


def _refuse_nothing(lines: "list[EpsilonLine]", epsilon: float | None = None) -> None:
    """Raise InputError, with the reason of a sound convention if possible, if no line has the wanted number."""
    if all((line.epsilon if epsilon is None else line.noise_multiplier) is None for line in lines):
        sound = [line for line in lines if line.convention.is_sound]
        what = "no epsilon can be computed" if epsilon is None else f"--epsilon {epsilon:g}"
        raise InputError(f"{what}: {(sound or lines)[0].note}")


def _warn(delta: float, population: int, unit: "Unit") -> None:
    if delta >= 1 / population:
        say(
            f"warning: delta {delta:g} is not below 1 / {population:,} {unit}s; publishing one {unit}'s data would "
            "satisfy it"
        )


MEASUREMENT = "Measurement of time and memory"


def plan(
    file: Annotated[Path, typer.Argument()],
    tier: Annotated[str | None, typer.Option(help=TIER, show_default="smoke")] = None,
    seeds: Seeds = None,
    only: Only = None,
    corpus: CorpusOption = None,
    set_: Overrides = None,
    effect: Annotated[float, typer.Option(min=0.0, metavar="BITS")] = 1.0,
    sd_canaries: Annotated[float | None, typer.Option(min=0.0, metavar="BITS", show_default="the demo's")] = None,
    sd_seeds: Annotated[float | None, typer.Option(min=0.0, metavar="BITS", show_default="the demo's")] = None,
    as_json: Json = False,
    at_once: AtOnce = None,
    calibration: Annotated[bool, typer.Option("--calibration/--no-calibration", rich_help_panel=MEASUREMENT)] = True,
) -> None:
    """Predict what a run or a sweep needs on this machine.

    Prints time, memory, disk, scale, amounts of training, epsilon, the largest epsilon that an audit of the runs can
    prove, and statistical power.

    Time and memory are measured: a short run of each configuration trains three rounds with two evaluations, and the
    times are multiplied by the numbers of rounds and evaluations. No files remain.

    Example: flsim plan experiments/table1.toml --tier smoke

    Example: flsim plan experiments/table2.toml --tier paper --no-calibration

    Args:
        file: TOML file of a sweep or of a run, e.g. experiments/table1.toml.
        effect: Difference in mean exposure, in bits, that the runs should detect.
        sd_canaries: Standard deviation of differences over canaries, in bits.
        sd_seeds: Standard deviation of differences between seeds, in bits.
        calibration: Train a short run of each configuration.
    """
    import torch

    from flsim.base.machine import cores
    from flsim.planning.measure import Machine, measure, scratch
    from flsim.planning.plan import page, plan_of, read_request
    from flsim.results.power import Spread

    for option, bits in (("--effect", effect), ("--sd-canaries", sd_canaries), ("--sd-seeds", sd_seeds)):
        if bits is not None and not math.isfinite(bits):
            raise InputError(f"{option} {bits:g}: must be a finite number of bits")
    if not effect:
        raise InputError("--effect 0: must be above 0")
    stated = {"canaries": sd_canaries, "seeds": sd_seeds}
    spread = Spread(**{over: bits for over, bits in stated.items() if bits is not None})
    machine = Machine(cores(), torch.cuda.device_count())
    with scratch() as folder:
        request = read_request(file, folder, tier, seeds, only or (), corpus, set_ or ())
        is_measured = calibration and request.is_there
        measured = measure(request.planned, machine, at_once, request.whole_cluster) if is_measured else None
        made = plan_of(request, machine, effect, spread, measured, at_once)
    show(lambda: asdict(made), lambda: page(made), as_json)
