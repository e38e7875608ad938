"""`flsim audit`, `membership`, `extract`, `forgetting` and `reveal`: attacks on runs, and their evidence."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flsim.base.errors import InputError
from flsim.cli import options

if TYPE_CHECKING:
    from flsim.attacks.result import Result


def audit(
    runs: Annotated[list[Path], typer.Argument(help=options.RUNS)],
    threshold: Annotated[
        int | None, typer.Option(min=1, metavar="RANK", show_default="|R| / 1,000, and 100 from |R| = 100,000 on")
    ] = None,
    delta: options.ClaimDelta = None,
    summary: Annotated[bool, typer.Option("--summary")] = False,
    round: options.Round = None,
    epoch: options.Epoch = None,
    format: Annotated[options.Format, typer.Option(metavar="FORMAT")] = "md",
    out: options.TableOut = None,
    as_json: options.Json = False,
) -> None:
    """Audit the privacy of a run with its canaries.

    Prints how many canaries an attacker finds at low false-positive rates, a lower bound on epsilon, and, for a run
    with noise, whether its ledger is refuted. For canary users, prints an estimate and a bound of epsilon. Also tests
    the cohorts and the noise of the rounds against the ledger. The last line names missing tests, and the settings that
    they need.

    Example: flsim audit runs/demo/iid runs/demo/non-iid

    Example: flsim audit runs/theirs --summary

    Example: flsim audit runs/dp --delta 1e-6 --format csv --out audit.csv

    Args:
        threshold: Largest rank at which a canary counts as found; choose it before you look at ranks.
        summary: Print one screen for a reader who decides, such as a data protection officer: what was tested and
            found, what follows, and what does not.
        format: Format of the output: md, csv or parquet.
    """
    import pandas as pd

    from flsim.attacks.audit.audit import audit_subject, subject_of, to_json, to_text
    from flsim.attacks.audit.summary import summary as summary_of
    from flsim.base.progress import say
    from flsim.results.rows import refuse_two_points
    from flsim.results.sweeps import over_runs
    from flsim.show.table import Table

    if format == "latex":
        raise InputError("--format latex: audits have the formats md, csv and parquet; choose one of them")
    options.refuse_wrong_output(format, out, as_json)
    refuse_two_points(round, epoch)
    subjects = over_runs(runs, lambda path: subject_of(path, round, epoch, delta)).values()
    if summary:
        if as_json or format != "md" or threshold is not None:
            raise InputError("--summary: is text of a fixed test; remove --json, --format and --threshold")
        options.print_or_write("\n".join(map(summary_of, subjects)), out)
        return
    pairs = [(subject, audit_subject(subject, threshold)) for subject in subjects]
    for subject, audited in pairs if format != "md" else []:
        if audited.frame.empty:
            say(f"run {subject.results.name}: has no row. {audited.notes[-1]}")
    frame = pd.concat([audited.frame for _, audited in pairs], ignore_index=True)
    text = "\n".join(to_text(*pair) for pair in pairs)
    if as_json:
        text = json.dumps({"runs": [to_json(*pair) for pair in pairs]}, indent=2) + "\n"
    options.write_table(Table(frame, [], []), format, out, text)


ELSEWHERE = "A model that was trained elsewhere"
OtherFactory = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FACTORY",
        help="For measurements of a model that code makes: the function, as for flsim evaluate. The file is executed.",
        show_default="none",
        rich_help_panel=ELSEWHERE,
    ),
]
Members = Annotated[
    Path | None,
    typer.Option(
        help="File of training records, .jsonl, .csv or .parquet, e.g. train.jsonl.",
        show_default="canaries only",
        rich_help_panel=ELSEWHERE,
    ),
]
NonMembers = Annotated[
    Path | None,
    typer.Option(
        "--non-members",
        help="With --members: file of records of the same kind that training did not read, e.g. heldout.jsonl.",
        show_default="canaries only",
        rich_help_panel=ELSEWHERE,
    ),
]
TextColumn = Annotated[str, typer.Option(help="Column of the text in the files of records.", rich_help_panel=ELSEWHERE)]
UserColumn = Annotated[
    str,
    typer.Option(help="With --personal-data: column of the user in the files of records.", rich_help_panel=ELSEWHERE),
]

Unit = Literal["record", "user"]  # whose membership is attacked
ATTACKS = "loss, reference, zlib, min-k, min-k++, neighbourhood, gradient, quantile, blind, ez, wbc, recall, dc-pdd"


def membership(
    runs: Annotated[list[Path], typer.Argument(help=options.RUNS)],
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTACK",
            help=f"Attack; repeatable: {ATTACKS}, or a custom attack as path/to/file.py:NAME; flsim executes the file.",
            show_default="loss to blind",
        ),
    ] = None,
    unit: Annotated[Unit, typer.Option()] = "record",
    records: Annotated[int, typer.Option(min=1, metavar="N")] = 1_000,
    reference: Annotated[Path | None, typer.Option(show_default="frequency of single words")] = None,
    shadows: Annotated[bool, typer.Option("--shadows")] = False,
    by_setting: options.OneSetting = False,
    out: options.FigureOut = None,
    delta: options.ClaimDelta = None,
    round: options.CheckpointRound = None,
    device: options.TorchDevice = "cpu",
    model: OtherFactory = None,
    members: Members = None,
    non_members: NonMembers = None,
    text_column: TextColumn = "text",
    as_json: options.Json = False,
) -> None:
    """Attack membership: distinguish training records or users from non-members.

    Members are records of training users that took part. Non-members are records of authors who are held out, in pairs
    of equal length. For a model trained elsewhere, both are its canaries, or records of --members and --non-members.
    With --unit user, members are users who took part. The attack scores a user by records that training did not read
    (data.user_holdout). Prints how well each attack distinguishes members from non-members, with controls, and stores
    the results in the run folder. --out shows the ROC curve of each attack on each run.

    Example: flsim membership runs/demo/iid runs/demo/non-iid

    Example: flsim membership runs/demo/non-iid --attack loss --attack min-k++ --records 5000 --json

    Example: flsim membership runs/demo/iid runs/demo/non-iid --out roc.png

    Example: flsim membership runs/lora --attack ez --attack wbc --reference base

    Example: flsim membership runs/demo/non-iid --attack my_attack.py:worst_word

    Example: flsim membership runs/theirs --model adapter.py:load

    Example: flsim membership runs/holdout --unit user

    Example: flsim membership runs/membership-smoke --unit user --over-seeds

    Args:
        unit: Unit whose membership is attacked: a record, or a user. A user is scored by records that training did not
            read.
        records: Largest number of members, and of non-members, e.g. 5000.
        reference: For the attacks reference, ez and wbc, and --unit user: checkpoint of a run on another corpus with
            the same vocabulary; or base, the model before training of architecture "hf".
        shadows: Attack each run with the other runs as shadow models, with LiRA and RMIA. All runs need data.shadow.
    """
    from flsim.attacks.membership.inference import AttackHParams, ElsewhereHParams, attack_run
    from flsim.attacks.membership.shadows import attack_users
    from flsim.attacks.membership.shadows import by_setting as by_shadows
    from flsim.attacks.membership.tables import draw, means_over_seeds, means_to_text, shadows_to_text, to_text
    from flsim.results.sweeps import expanded, over_runs, run_folders
    from flsim.show.figure import write_figure
    from flsim.show.table import json_rows

    if shadows:
        if out is not None:
            raise InputError(f"--out {out}: attacks with shadow models have no figure; remove --out or --shadows")
        if by_setting:
            raise InputError(
                "--over-seeds: with --shadows, the seeds of a setting are its shadow models; remove --over-seeds "
                "or --shadows"
            )
        others = {"--attack": attack, "--reference": reference, "--model": model, "--members": members}
        if unused := [name for name, value in others.items() if value]:
            raise InputError(f"{', '.join(unused)}: is not for attacks with shadow models; remove it, or --shadows")
        hparams = AttackHParams(records, round, delta=delta, device=device)
        of_settings = list(by_shadows(run_folders(expanded(runs)), hparams))
        objects = [
            {"setting": setting, "attacks": json_rows(attacks), "targets": json_rows(targets)}
            for setting, attacks, targets in of_settings
        ]
        options.show(
            lambda: {"shadows": objects}, lambda: "\n".join(shadows_to_text(*result) for result in of_settings), as_json
        )
        return
    if unit == "user" and attack:
        raise InputError(
            f"--attack {attack[0]}: this option is for attacks on records, and users have a single attack; remove "
            "--attack or --unit user"
        )

    elsewhere = ElsewhereHParams(model, members, non_members, text_column)
    hparams = AttackHParams(records, round, reference, delta, device, elsewhere)
    is_of_users = unit == "user"
    results = over_runs(
        runs, lambda path: attack_users(path, hparams) if is_of_users else attack_run(path, attack or (), hparams)
    )
    if out is not None:
        write_figure(lambda: draw(results), out)
    if by_setting:
        means = means_over_seeds(results)
        options.show(lambda: json_rows(means), lambda: means_to_text(means), as_json)
    else:
        _print_by_run(results, to_text, as_json)


SAMPLING = "Sampling"
of_sampling = partial(typer.Option, rich_help_panel=SAMPLING)


def extract(
    runs: Annotated[list[Path], typer.Argument(help=options.RUNS)],
    prefix: Annotated[
        list[int] | None, typer.Option(min=1, metavar="WORDS", show_default="1, 3, 5 and 10, if strings are longer")
    ] = None,
    suffix: Annotated[int, typer.Option(min=1, metavar="WORDS")] = 5,
    records: Annotated[int, typer.Option(min=1, metavar="N")] = 1_000,
    temperature: Annotated[float, of_sampling()] = 1.0,
    top_k: Annotated[int, of_sampling(metavar="N")] = 40,
    top_p: Annotated[float, of_sampling()] = 1.0,
    edits: Annotated[int | None, typer.Option(min=0, metavar="WORDS", show_default="neither")] = None,
    personal_data: Annotated[bool, typer.Option("--personal-data")] = False,
    names: Annotated[Path | None, typer.Option()] = None,
    by_setting: options.OneSetting = False,
    out: options.FigureOut = None,
    round: options.CheckpointRound = None,
    epoch: options.Epoch = None,
    device: options.TorchDevice = "cpu",
    model: OtherFactory = None,
    members: Members = None,
    non_members: NonMembers = None,
    text_column: TextColumn = "text",
    user_column: UserColumn = "user",
    as_json: options.Json = False,
) -> None:
    """Measure which training text an attacker can extract.

    Shows the model the first words of canaries and of training records, and prints how many it completes: greedily, or
    in one of n samples with probability p. Also prints the rates of held-out records of equal length, because frequent
    phrases are "extracted" from any model. Also counts strings that a prompt of one word elicits, near-verbatim
    completions, and strings that few users hold.

    Example: flsim extract runs/demo/iid runs/demo/non-iid

    Example: flsim extract runs/demo/non-iid --prefix 1 --prefix 3 --suffix 4 --out extraction.png

    Example: flsim extract runs/four-settings-demo --over-seeds

    Example: flsim extract runs/demo/non-iid --top-k 0 --top-p 0.9 --json

    Example: flsim extract runs/lora --personal-data --names names.txt

    Example: flsim extract runs/theirs --personal-data --members train.jsonl --non-members heldout.jsonl

    Args:
        prefix: Number of first words that the attacker knows; repeatable, e.g. --prefix 1 --prefix 3.
        suffix: Largest number of words after the prefix of a record, e.g. 10.
        records: Largest number of training records, and of held-out records, e.g. 5000.
        temperature: Divisor of log-probabilities; 1 leaves the model's probabilities unchanged.
        top_k: Number of most likely tokens to sample from; 0 samples from all tokens.
        top_p: Sample from the most likely tokens with this share of the probability, e.g. 0.9.
        edits: Also count suffixes with at most this number of inserted, deleted or replaced words, and suffixes with a
            BLEU score above 0.75, e.g. 2.
        personal_data: Measure which mail addresses, telephone and card numbers of a user the model generates from text
            of this user, and of others.
        names: With --personal-data: file with a name on each line, to search for names as well.
    """
    from flsim.attacks.extraction.extract import extract as extract_from
    from flsim.attacks.extraction.personal import personal_data_of
    from flsim.attacks.extraction.personal import to_text as personal_data_to_text
    from flsim.attacks.extraction.tables import draw, over_seeds_to_text, to_text
    from flsim.attacks.membership.inference import AttackHParams, ElsewhereHParams
    from flsim.results.sweeps import over_runs
    from flsim.show.figure import write_figure

    elsewhere = ElsewhereHParams(model, members, non_members, text_column, user_column)
    if personal_data:
        if prefix or edits is not None or by_setting or out is not None or epoch is not None:
            raise InputError("--personal-data: remove --prefix, --edits, --over-seeds, --out and --epoch")
        if sampling := options.given(SAMPLING):
            raise InputError(f"{', '.join(sampling)}: --personal-data decodes greedily; remove these options")
        hparams = AttackHParams(records, round, device=device, elsewhere=elsewhere)
        results = over_runs(runs, lambda path: personal_data_of(path, names, hparams))
        _print_by_run(results, personal_data_to_text, as_json)
        return
    if names is not None:
        raise InputError(f"--names {names}: is for --personal-data; add it, or remove --names")
    measured = extract_from(
        *runs,
        prefixes=prefix or (),
        suffix=suffix,
        records=records,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        edits=edits,
        round=round,
        epoch=epoch,
        device=device,
        elsewhere=elsewhere,
    )
    if out is not None:
        write_figure(lambda: draw(measured, by_setting), out)
    text = over_seeds_to_text if by_setting else to_text
    options.show(measured.to_json, lambda: text(measured), as_json)


def _print_by_run(results: Mapping[Path, "Result"], to_text: Callable[[str, "Result"], str], as_json: bool) -> None:
    options.show(
        lambda: {"runs": [{"folder": str(path)} | one.to_json() for path, one in results.items()]},
        lambda: "\n".join(to_text(path.resolve().name, one) for path, one in results.items()),
        as_json,
    )


def forgetting(
    runs: Annotated[list[Path], typer.Argument(help=options.RUNS)],
    alpha: Annotated[float, typer.Option()] = 0.6,
    by_hardness: Annotated[bool, typer.Option("--by-hardness")] = False,
    pool: Annotated[bool, typer.Option("--pool")] = False,
    out: options.FigureOut = None,
    as_json: options.Json = False,
    as_csv: Annotated[bool, typer.Option("--csv")] = False,
) -> None:
    """Measure how fast canaries are forgotten.

    Compares runs that plant canaries (arm IN) with their twins that plant none (arm OUT, canaries.arm = "out"). For
    each group of canaries, prints exposure, accuracy and precision against the rounds since last use, and T(alpha), the
    time after which an attack succeeds at most at rate alpha. Without runs of arm OUT, prints exposure only.

    Example: flsim forgetting runs/in runs/out

    Example: flsim forgetting runs/forgetting-smoke --alpha 0.65 --out forgetting.png

    Example: flsim forgetting runs/forgetting-smoke --by-hardness --csv > forgetting.csv

    Args:
        alpha: Accuracy up to which canaries count as forgotten, e.g. 0.6; chance is 0.5.
        by_hardness: Divide canaries into thirds by their log-perplexity in arm OUT.
        pool: Combine all numbers of copies in one group.
        as_csv: Print a row for each group and number of rounds as CSV instead of text.
    """
    options.refuse_json_and_csv(as_json, as_csv)
    from flsim.attacks.forgetting.measure import measure_forgetting
    from flsim.attacks.forgetting.tables import draw, to_text
    from flsim.show.figure import write_figure
    from flsim.show.table import to_csv

    measured = measure_forgetting(*runs, alpha=alpha, by_hardness=by_hardness, pool=pool)
    if out is not None:
        write_figure(lambda: draw(measured), out)
    text = to_csv(measured.success) if as_csv else to_text(measured)
    options.show(measured.to_json, lambda: text, as_json)


def reveal(
    runs: Annotated[list[Path], typer.Argument(help=options.RUNS)],
    round: Annotated[
        int | None, typer.Option(min=1, show_default="the last round of each run that has a checkpoint before it")
    ] = None,
    records: Annotated[int, typer.Option(min=1, metavar="N")] = 100,
    references: Annotated[int, typer.Option(min=1, metavar="N")] = 999,
    noise: Annotated[list[float] | None, typer.Option(metavar="Z", show_default="only the noise of the run")] = None,
    out: options.FigureOut = None,
    device: options.TorchDevice = "cpu",
    as_json: options.Json = False,
) -> None:
    """Measure what the updates of a round reveal about its users.

    Trains the users of the round again, and attacks one user's update and sums over 1, 10, 100 and all users: plain,
    clipped, and with noise, as the run is configured. Prints how well an attacker reads the words of these users from
    the sum, and whether the attacker detects records and canaries in the sum, with exact p-values and controls. Takes
    about as long as the training of one round.

    Example: flsim reveal runs/demo/non-iid --round 41

    Example: flsim reveal runs/dp --noise 0.01 --noise 0.1 --out reveal.png

    Args:
        round: Round whose updates are attacked, e.g. 41; needs the checkpoint before it.
        records: Largest number of records to test inside each sum, and outside.
        references: Largest number K of references of a test; the smallest p-value is 1 / (K + 1).
        noise: Noise multiplier of further sums, for a run with a clip; repeatable, e.g. --noise 0.1 --noise 1.
    """
    from flsim.attacks.reveal.reveal import reveal as reveal_in
    from flsim.attacks.reveal.tables import draw, to_text
    from flsim.show.figure import write_figure

    revealed = reveal_in(*runs, round=round, records=records, references=references, noise=noise or (), device=device)
    if out is not None:
        write_figure(lambda: draw(revealed), out)
    options.show(revealed.to_json, lambda: to_text(revealed), as_json)
