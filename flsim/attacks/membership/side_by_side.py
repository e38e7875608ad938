"""Evidence about two runs side by side: their audits, and stored rows of attacks on membership."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.attacks.audit.audit import audit_subject, to_json
from flsim.attacks.audit.subject import Subject, subject_of
from flsim.attacks.audit.testing import in_words
from flsim.attacks.membership.stored import newest_rows
from flsim.attacks.result import Result
from flsim.base.errors import InputError
from flsim.results.store import read_run
from flsim.show.table import Column, json_rows, markdown, note

NOTE = (
    ">=: a lower bound on epsilon with 95% confidence. About: an estimate, which can exceed the true epsilon. "
    "Ledger: whether a test refutes the claim of the run. Limit: the largest epsilon that the test can refute "
    "if all guesses are right. Cannot be tested: no outcome refutes the claim. Attacks on membership: the "
    "probability that a member scores above a non-member (AUROC), with a 95% interval by resampling authors; "
    "with *, an attack without the model also succeeds. No row tests the difference between the runs. `flsim "
    "audit` and `flsim membership` have more."
)


@dataclass(frozen=True)
class Proof:
    """The evidence about one run: its audit, without a subject if it cannot be audited, and stored rows of attacks."""

    subject: Subject | None
    audited: Result
    membership: pd.DataFrame

    @classmethod
    def read(cls, path: Path, round: int | None = None, epoch: float | None = None) -> "Proof":
        """Read the evidence about a run at an evaluated round or epoch; by default the last round."""
        subject, identity = None, read_run(path).identity
        with suppress(InputError):  # for example a missing checkpoint, which the rest of the comparison does not need
            subject = subject_of(path, round, epoch)
        audited = Result(frame=pd.DataFrame()) if subject is None else audit_subject(subject)
        return cls(subject, audited, newest_rows(path, identity))

    def statements(self) -> dict[str, str]:
        named: dict[str, str] = {}
        for row in self.audited.frame.to_dict("records"):
            if pd.notna(row["low"]) and row["method"] != "tpr":
                named[row["method"]] = f">= {row['low']:.2f}"
            elif (outcome := in_words(row)) and pd.notna(row["p_value"]):  # a test of the rounds
                named[f"ledger, {row['method']}"] = f"{outcome} (p = {row['p_value']:.2g})"
            elif outcome:
                named[row["method"].replace("trade-off", "ledger")] = outcome
                named[row["method"].replace("trade-off", "limit")] = f"{row['refutable']:.2f}"
            elif row["kind"] == "estimate":
                named[row["method"]] = f"about {row['estimate']:.2f}"
        if self.subject is not None and self.subject.claim is not None:
            named["epsilon of the ledger"] = f"{self.subject.claim.epsilon:.3g}"
        for row in self.membership.to_dict("records"):
            interval = f"({row['auroc_low']:.3f}-{row['auroc_high']:.3f})" + "*" * bool(row["is_confounded"])
            named[f"{row['unit']}s: {row['attack']}"] = f"{row['auroc']:.3f} {interval}"
        return named

    def to_json(self) -> dict[str, Any]:
        audited = {} if self.subject is None else to_json(self.subject, self.audited)
        return audited | {"membership": json_rows(self.membership)}


def to_markdown(a: Proof, b: Proof) -> str:
    """Return a section with a row for each statement on either run; empty if there is none."""
    first, second = a.statements(), b.statements()
    names = list(dict.fromkeys([*first, *second]))
    if not names:
        return ""
    sides = [Column(side, [values.get(name, "") for name in names]) for side, values in (("a", first), ("b", second))]
    table = markdown([Column("Epsilon, or attack on", names, is_number=False)], [sides])
    return f"## Evidence from audits and attacks\n\n{table}\n{note(NOTE)}"
