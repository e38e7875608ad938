"""Section of a report on what the canaries prove about privacy, beside what the ledger claims."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from flsim.audits.audit import of_canary_users, of_coins
from flsim.audits.pooled import Pooled, pooled
from flsim.audits.subject import Subject, subject_of
from flsim.audits.testing import Verdict
from flsim.base.errors import InputError
from flsim.report import proof_figures
from flsim.report.blocks import Block, Cell, Heading, Table, left, number
from flsim.report.gather import Gathered, Setting

NOTE = (
    "Found: canaries of a rank that a canary which training never saw would have at the false-positive rate (FPR), of "
    "all canaries of all seeds. ε at least: a lower bound with 95% confidence for one user, or record, under replacing "
    "one and at δ = 0. A canary of g users says of one only an ε of g times less. So IID twins, whose canaries have "
    "many users, prove little. A bound of 0 proves nothing, not even privacy. `flsim audit` has more."
)
COINS = (
    "Coins decided which canaries were planted. Guessed: those of the highest and the lowest ranks; right: how many of "
    "these guesses are. ε at least: a lower bound with 95% confidence at this δ, for one user, or record, under "
    "replacing one."
)
USERS = (
    "Canary users sent random updates as long as the clip norm. ε about: an estimate from the cosines of their vectors "
    "and the change of the model, which may be above the truth. ε at least: a lower bound with 95% confidence, from "
    "guesses of the coins that decided who took part. Both are of one user, whose updates are in the sums or not."
)
LEDGER = (
    " Ledger: whether the test refutes the ledger. At most: the largest ε at the ledger’s δ that "
    "the test can refute if all guesses are right. Cannot be tested: no outcome refutes the ledger."
)


@dataclass(frozen=True)
class _Audited:
    """The runs of a setting with canaries or canary users, and what ranks prove together; None without ranks."""

    setting: Setting
    subjects: Sequence[Subject]
    ranked: Pooled | None


def proof(gathered: Gathered) -> list[Block]:
    """Return tables and curves of each setting whose canaries were ranked, or that has canary users."""
    every = [_audited(setting) for setting in gathered.settings]
    blocks = [*_of_ranks(every), *_of_coins(every), *_of_users(every)]
    named = [(audited.setting, audited.subjects) for audited in every if audited.subjects]
    return [*blocks, *proof_figures.curves(named)] if blocks else []


def _of_ranks(every: Sequence[_Audited]) -> list[Block]:
    audited = [(one.setting, one.ranked) for one in every if one.ranked]
    if not audited:
        return []
    headings = [left("Setting"), Heading("Seeds"), Heading("FPR"), Heading("Found"), Heading("ε at least")]
    has_claims = any(result.claim for _, result in audited)
    if has_claims:
        headings += [Heading("Allowed"), Heading("Ledger’s ε"), left("Ledger")]
    rows = [_row(setting, result, has_claims) for setting, result in audited]
    return [Table("What an attacker finds, and what that proves", headings, rows, NOTE + LEDGER * has_claims)]


def _row(setting: Setting, result: Pooled, has_claims: bool) -> list[Cell]:
    detection = result.detection
    share = f"{detection.tpr:.0%} ({detection.tpr_low:.0%} to {detection.tpr_high:.0%})"
    cells: list[Cell] = [setting.label, f"{result.runs}", f"{detection.fpr:.2g}", share, number(result.low, "{:.2f}")]
    if has_claims:
        claim = result.claim
        cells += [number(result.allowed, "{:.1%}"), number(claim and claim.epsilon, "{:.3g}"), _verdict(result.verdict)]
    return cells


def _of_coins(every: Sequence[_Audited]) -> list[Block]:
    """Return a table with a row for each run whose canaries coins decided on."""
    rows: list[list[Cell]] = []
    for one in every:
        for subject in one.subjects:
            proven = {row["method"]: row for row in of_coins(subject)}
            if (bound := proven.get("epsilon, coins")) is None:
                continue
            claim = subject.claim
            rows.append(
                [
                    _named(one.setting, subject),
                    f"{bound['n_in']:,} of {bound['n_in'] + bound['n_out']:,}",
                    f"{bound['detected']:,} of {2 * bound['threshold']:,}",
                    number(bound["delta"], "{:.2g}"),
                    number(bound["low"], "{:.2f}"),
                    number(claim and claim.epsilon, "{:.3g}"),
                    _verdict(Verdict.of_row(proven.get("trade-off, coins", {}))),
                ]
            )
    headings = [left("Run"), Heading("Planted"), Heading("Guessed right"), Heading("δ"), Heading("ε at least")]
    headings += [Heading("Ledger’s ε"), left("Ledger")]
    return [Table("What guesses of coins prove", headings, rows, COINS + LEDGER)] if rows else []


def _named(setting: Setting, subject: Subject) -> str:
    return setting.label + ("" if subject.results.seed is None else f", seed {subject.results.seed}")


def _of_users(every: Sequence[_Audited]) -> list[Block]:
    """Return a table with a row for each run that has canary users."""
    rows: list[list[Cell]] = []
    for one in every:
        for subject in one.subjects:
            if (users := subject.canary_users) is None:
                continue
            proven = {row["method"]: row for row in of_canary_users(subject)}
            estimate = proven.get("epsilon, canary users", {}).get("estimate")
            bound = proven.get("epsilon, canary users by coins", {}).get("low")
            claim = subject.claim
            rows.append(
                [
                    _named(one.setting, subject),
                    f"{len(users.members):,} of {len(users.cosines):,}",
                    number(users.delta, "{:.2g}"),
                    number(estimate, "{:.2f}"),
                    number(bound, "{:.2f}"),
                    number(claim and claim.epsilon, "{:.3g}"),
                    _verdict(Verdict.of_row(proven.get("trade-off, canary users by coins", {}))),
                ]
            )
    headings = [left("Run"), Heading("Canary users"), Heading("δ"), Heading("ε about"), Heading("ε at least")]
    headings += [Heading("Ledger’s ε"), left("Ledger")]
    return [Table("What canary users with random updates show", headings, rows, USERS + LEDGER)] if rows else []


def _verdict(verdict: Verdict | None) -> str:
    return "–" if verdict is None else f"{verdict.in_words} (at most {verdict.refutable:.2f})"


def _audited(setting: Setting) -> _Audited:
    subjects: list[Subject] = []
    for run, round_ in setting.shown_runs:
        with suppress(InputError):  # an older run has no row
            subjects.append(subject_of(run.path, round_))
    subjects = [subject for subject in subjects if len(subject.ranks) or subject.coins or subject.canary_users]
    ranked = [subject for subject in subjects if len(subject.ranks)]
    return _Audited(setting, subjects, pooled(ranked) if ranked else None)
