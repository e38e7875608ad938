"""An audit as text for people: what is found at each false-positive rate, and sentences that can be quoted."""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from flsim.attacks.audit.audit import canaries_needed
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.subject import Subject
from flsim.show.table import Column, formatted, markdown, note

FOUND = (
    "Found: canaries of so high a rank, of all that were planted, with a 95% interval that treats them as independent."
)
FPR = (
    "FPR: the false-positive rate of that test. A canary that training never saw has each rank with the same "
    "probability, so that the rate is exact."
)
LEAST_SHOWN = 0.005  # of an epsilon with two decimals
ALLOWED = "Allowed: the largest share that the run's own ledger leaves to any attacker."


def to_text(subject: Subject, table: pd.DataFrame) -> str:
    """Return the audit of one run.

    Args:
        subject: the run.
        table: its rows, from `flsim.attacks.audit.audit.audit`.
    """
    results = subject.results
    title = f"{results.setting} ({results.name}), after round {subject.round:,}\n"
    lacking = missing(subject, table)
    last = [text for text in (subject.note, lacking) if text]
    if not len(subject.ranks):
        return "\n".join([title, *map(note, [*_ledger_alone(subject, table), *_others(subject, table), *last])])
    rates = table[table["method"] == "tpr"]
    columns = [
        Column("FPR", formatted(rates["fpr"], "{:.2g}"), note=FPR),
        Column("Rank", formatted(rates["threshold"], "{:,}")),
        Column("Found", [f"{hits} of {total}" for hits, total in zip(rates["detected"], rates["n_in"], strict=True)]),
        Column("%", formatted(rates["estimate"], "{:.0f}", 100), note=FOUND),
        Column(
            "95%", [f"{100 * low:.0f}-{100 * high:.0f}" for low, high in zip(rates["low"], rates["high"], strict=True)]
        ),
    ]
    if rates["allowed"].notna().any():
        columns.append(Column("Allowed %", formatted(rates["allowed"], "{:.1f}", 100), note=ALLOWED))
    paragraphs = [sentence(subject, table), *_others(subject, table), _groups(subject), *last]
    return "\n".join([title, markdown(columns[:1], [columns[1:]]), *map(note, paragraphs)])


def to_object(subject: Subject, table: pd.DataFrame) -> dict[str, Any]:
    """Return the audit of one run for JSON.

    Args:
        subject: the run.
        table: its rows, from `flsim.attacks.audit.audit.audit`.

    Returns:
        ``run``, ``setting``, ``round``, ``rows`` (unknown values are None) and ``missing``, the sentence of `missing`.
    """
    results = subject.results
    of_run = {"run": results.name, "setting": results.setting, "round": subject.round}
    rows = json.loads(table.drop(columns=[*of_run]).to_json(orient="records", double_precision=15))
    return of_run | {"rows": rows, "missing": missing(subject, table)}


def missing(subject: Subject, table: pd.DataFrame) -> str | None:
    """Return one sentence on what cannot be said of a run, and on the settings that it needs; None without such."""
    methods, needs = set(table["method"]), []
    if "epsilon" not in methods:
        source = ' with canaries.source "words"' if "is_natural" in subject.results.roster else ""
        needs.append(f"a bound from ranks (canaries.count{source})")
    if not methods & {"epsilon, coins", "epsilon, canary users by coins"}:
        needs.append("a bound from guesses of coins, of at least 10 canaries (canaries.coins)")
    if subject.unit == "user" and "epsilon, canary users" not in methods:
        users = subject.canary_users
        what = "a model of more parameters" if users and users.is_too_small else "audit.update_canaries"
        needs.append(f"an estimate from canary users ({what})")
    if subject.claim is None and not subject.note:
        needs.append('whether a ledger is contradicted (privacy.mechanism "dp")')
    return f"Missing, with what it needs: {'; '.join(needs)}." if needs else None


def sentence(subject: Subject, table: pd.DataFrame) -> str:
    """Return what the audit proves, in words that can be quoted."""
    row = row_of(table, "epsilon")
    about = (
        f"{row['detected']} of {row['n_in']} canaries rank among the first {row['threshold']:,} of "
        f"{subject.references + 1:,} phrases."
    )
    low = float(row["low"])
    if subject.claim is None:
        return f"{about} {_without_claim(low, subject.unit)}"
    stated = f"The ledger claims {_stated(subject.claim, subject.unit)}."
    under_pure = f" With delta 0 it would prove an epsilon of {low:.2f} (replace-one)." if low else ""
    return f"{about} {stated} {_verdict(table, 'trade-off', subject.claim)}{under_pure}"


def row_of(table: pd.DataFrame, method: str) -> Mapping[Any, Any]:
    """Return the only row of a method."""
    (row,) = table[table["method"] == method].to_dict("records")
    return row


def _without_claim(low: float, unit: str) -> str:
    if low == 0:
        return "Chance may do that, so that nothing is proven about the privacy of this training."
    return (
        f"If this training were epsilon-differentially private for one {unit} (replace-one, delta 0) with epsilon "
        f"below {low:.2f}, that would happen in at most 5% of runs. So no smaller epsilon can be claimed for it."
    )


def _stated(claim: Claim, unit: str) -> str:
    return f"epsilon {claim.epsilon:.3g} at delta {claim.delta:.3g} for one {unit} ({claim.convention.name})"


def _ledger_alone(subject: Subject, table: pd.DataFrame) -> list[str]:
    """Return a sentence on the claim of a run without any row that could contradict it."""
    if subject.claim is None or set(table["method"]) - {"participation", "noise"}:
        return []
    return [f"The ledger claims {_stated(subject.claim, subject.unit)}, and nothing was planted that could test it."]


def _others(subject: Subject, table: pd.DataFrame) -> list[str]:
    sentences = []
    if subject.claim is not None and len(subject.ranks):
        row = row_of(table, "epsilon, GDP")
        sentences.append(
            f"Estimate, not a bound: if training is a Gaussian mechanism, epsilon is at least {row['estimate']:.2f} at "
            f"delta {subject.claim.delta:.3g} ({subject.claim.convention.relation})."
        )
    if subject.coins is not None and "epsilon, coins" in set(table["method"]):
        row = row_of(table, "epsilon, coins")
        sentences.append(
            f"Coins decided on {row['n_in'] + row['n_out']} canaries. Of {2 * row['threshold']} guesses, those of the "
            f"highest and the lowest ranks, {row['detected']} are right, which proves an epsilon of at least "
            f"{row['low']:.2f} at delta {row['delta']:.3g} (replace-one)."
        )
        if subject.claim is not None:
            sentences.append(_verdict(table, "trade-off, coins", subject.claim))
    sentences += [*_of_canary_users(subject, table), *_of_rounds(subject, table)]
    if len(subject.control_ranks):
        row = row_of(table, "epsilon, controls")
        sentences.append(
            f"Heuristic, as canaries of one model are not independent: against {row['n_out']} canaries that were never "
            f"planted, epsilon is at least {row['low']:.2f}."
        )
    return sentences


def _of_canary_users(subject: Subject, table: pd.DataFrame) -> list[str]:
    users, methods, sentences = subject.canary_users, set(table["method"]), []
    if users is None:
        return []
    stated = ""
    if subject.claim is not None:
        stated = f" The ledger claims {subject.claim.epsilon:.3g} ({subject.claim.convention.name})."
    if "epsilon, canary users" in methods:
        row = row_of(table, "epsilon, canary users")
        apart = float(users.members.mean()) * users.dimension**0.5
        sentences.append(
            f"Estimate, not a bound: {row['n_in']:,} canary users sent random updates. Along these the model moved "
            f"{apart:.2f} standard deviations of chance on average, as under an epsilon of {row['estimate']:.2f} at "
            f"delta {row['delta']:.3g} of one user (zero-out).{stated}{_by_chance(table)}"
        )
    if "epsilon, canary users by coins" in methods:
        row = row_of(table, "epsilon, canary users by coins")
        method = "trade-off, canary users by coins"
        verdict = f" {_verdict(table, method, subject.claim)}" if subject.claim is not None else ""
        sentences.append(
            f"Bound: coins decided on {row['n_in'] + row['n_out']:,} canary users. Of {2 * row['threshold']:,} "
            f"guesses, those of the largest and the smallest cosines, {row['detected']:,} are right, which proves an "
            f"epsilon of at least {row['low']:.2f} at delta {row['delta']:.3g} of one user (zero-out).{verdict}"
        )
    return sentences


def _of_rounds(subject: Subject, table: pd.DataFrame) -> list[str]:
    sentences = []
    for method, test in (("participation", subject.participation), ("noise", subject.noise)):
        if test is not None:
            verdict = "is refuted" if row_of(table, method)["refuted"] else "is not refuted"
            sentences.append(
                f"Rounds: the audit drew the {method} of {test.rounds:,} rounds again from the seed. The ledger states "
                f"{test.stated}, which {verdict} (p = {test.p_value:.2g})."
            )
    return sentences


def _by_chance(table: pd.DataFrame) -> str:
    if "epsilon, canary users left out" not in set(table["method"]):
        return ""
    row = row_of(table, "epsilon, canary users left out")
    return f" The {row['n_out']:,} that took no part give {row['estimate']:.2f}: so far chance alone goes."


def _verdict(table: pd.DataFrame, method: str, claim: Claim) -> str:
    """Return whether a test refutes the ledger, or what the test could have found."""
    row = row_of(table, method)
    if row["refuted"]:
        return "The test refutes the ledger at 95% confidence."
    most = int(row["n_in"]) if method == "trade-off" else 2 * int(row["threshold"])
    kind = "canaries found" if method == "trade-off" else "right guesses"
    limit = f"The test can refute an epsilon up to {row['refutable']:.2f} at delta {claim.delta:.3g}."
    if row["refutable"] < LEAST_SHOWN:
        limit = "This test can refute no epsilon at all."
        if number := canaries_needed(row, claim):
            what = "canary users" if "canary users" in method else "canaries"
            limit += f" {number:,} {what}{' with coins' * ('coins' in method)} would make the ledger testable."
    if pd.isna(row["needed"]):
        all_right = f"even {most:,} of {most:,} {kind} do not refute it"
        return f"The ledger cannot be tested: {all_right}. {limit}"
    outcome = f"{row['needed']:,} of {most:,} {kind} would"
    return f"The test does not refute the ledger; {outcome}. {limit}"


def _groups(subject: Subject) -> str:
    low, high = int(subject.groups.min()), int(subject.groups.max())
    size = f"{low}" if low == high else f"{low} to {high}"
    counted = "" if subject.is_exact else ", where copies are counted for users, since the corpus is not here"
    return (
        f"Each canary is shared by {size} {subject.unit}s{counted}. A canary of g {subject.unit}s says of one only an "
        f"epsilon of g times less, and the figures above are of one {subject.unit}."
    )
