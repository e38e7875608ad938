"""Section of a report on what the canaries prove about privacy, beside what the ledger claims."""

from contextlib import suppress

from flsim.audits.pooled import Pooled, pooled
from flsim.audits.subject import Subject, subject_of
from flsim.base.errors import InputError
from flsim.report.blocks import Block, Cell, Heading, Table, left, number
from flsim.report.gather import Gathered, Setting

NOTE = (
    "Found: canaries of a rank that a canary which training never saw would have at the false-positive rate (FPR), of "
    "all canaries of all seeds. ε at least: a lower bound with 95% confidence for one user, or record, under replacing "
    "one and at δ = 0. A canary of g users says of one only an ε of g times less. So IID twins, whose canaries have "
    "many users, prove little. A bound of 0 proves nothing, not even privacy. `flsim audit` has more."
)


def proof(gathered: Gathered) -> list[Block]:
    """Return a row for each setting whose canaries were ranked; nothing where none were."""
    audited = [(setting, result) for setting in gathered.settings if (result := _audited(setting))]
    if not audited:
        return []
    headings = [left("Setting"), Heading("Seeds"), Heading("FPR"), Heading("Found"), Heading("ε at least")]
    has_claims = any(result.claim for _, result in audited)
    if has_claims:
        headings += [Heading("Allowed"), Heading("Ledger’s ε"), left("Ledger")]
    rows = [_row(setting, result, has_claims) for setting, result in audited]
    return [Table("What an attacker finds, and what that proves", headings, rows, NOTE)]


def _row(setting: Setting, result: Pooled, has_claims: bool) -> list[Cell]:
    detection = result.detection
    share = f"{detection.tpr:.0%} ({detection.tpr_low:.0%} to {detection.tpr_high:.0%})"
    cells: list[Cell] = [setting.label, f"{result.runs}", f"{detection.fpr:.2g}", share, number(result.low, "{:.2f}")]
    if has_claims:
        claim = result.claim
        verdict = "–" if result.refuted is None else "refuted" if result.refuted else "not contradicted"
        cells += [number(result.allowed, "{:.1%}"), number(claim and claim.epsilon, "{:.3g}"), verdict]
    return cells


def _audited(setting: Setting) -> Pooled | None:
    subjects: list[Subject] = []
    for run, round_ in setting.shown_runs:
        with suppress(InputError):  # an older run, or one whose canaries were not ranked, has no row
            subjects.append(subject_of(run.path, round_))
    return pooled(subjects) if subjects else None
