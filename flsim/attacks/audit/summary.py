"""`flsim audit --summary`: one screen about a model for a reader who decides, such as a data protection officer.

A canary's rank among R random phrases has the p-value rank / (R + 1). All canaries are tested at once with the method
of Holm (1979), which is valid for any dependence between canaries.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from flsim.attacks.audit.audit import Subject, audit_subject
from flsim.base.errors import InputError
from flsim.base.statistics import auroc, holm, share_interval, upper_bound
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import flags
from flsim.results.tables import copies
from flsim.show.table import Column, markdown, note

WRITTEN = next(flag for flag in flags(QUANTITIES.values()) if flag.is_standard and not flag.is_ranked)
LEVEL = 0.05  # probability of a wrong detection among all canaries
MOST_LINES = 6  # of a table by copies; more numbers of copies are grouped by powers of two
FIRST = "Copies in training"
FROM = {  # methods of bounds on epsilon
    "epsilon": "ranks", "epsilon, coins": "guesses of coins",
    "epsilon, canary users by coins": "guesses of coins of canary users",
}  # fmt: skip
UNKNOWN = ""  # in place of a number that was not measured


def detected_canaries(subject: Subject) -> pd.DataFrame:
    """Return ``copies``, ``p_value`` (corrected), ``detected`` and ``extracted`` of each canary of the roster.

    ``extracted`` is NaN without a beam search. InputError if no canary was ranked, or rank 1 could not be detected.
    """
    results = subject.results
    ranks = results.of_canaries("rank", subject.round)
    if ranks is None or not len(subject.ranks) or "insertions" not in results.roster:
        raise InputError(f"run {results.name}: no random canary was ranked after training on it, so nothing is proven")
    least = int(np.ceil(len(ranks) / LEVEL)) - 1
    if subject.references < least:
        raise InputError(
            f"run {results.name}: {len(ranks)} canaries among {subject.references:,} references: not even rank 1 would "
            f"be a detection; measure with --references {least:,} or more"
        )
    p_values = np.array(holm((ranks / (subject.references + 1)).tolist()))
    extracted = results.of_canaries(WRITTEN.name, subject.round)
    return pd.DataFrame(
        {
            "copies": results.roster["insertions"].to_numpy(),
            "p_value": p_values,
            "detected": p_values <= LEVEL,
            "extracted": np.nan if extracted is None else extracted.to_numpy(),
        },
        index=ranks.index,
    )


def summary(subject: Subject) -> str:
    """Return the summary of a model as text, at most 80 characters wide."""
    canaries, results = detected_canaries(subject), subject.results
    blocks = [
        f"What the model memorized: {results.setting} ({results.name}), after round {subject.round:,}",
        *("TESTED", " ".join(_tested(subject, canaries))),
        *("FOUND", markdown(*_by_copies(canaries)).rstrip(), " ".join(_found(subject, canaries))),
        *("WHAT FOLLOWS", *(f"- {sentence}" for sentence in _follows(subject, canaries))),
        *("WHAT DOES NOT FOLLOW", *(f"- {sentence}" for sentence in _open(subject, canaries))),
    ]
    return "\n".join(block if block.startswith("|") else note(block).rstrip() for block in blocks) + "\n"


def _tested(subject: Subject, canaries: pd.DataFrame) -> Iterator[str]:
    results, planted = subject.results, int((canaries["copies"] > 0).sum())
    length, known = results.length, results.prefix
    words = f" of {length} words" if length else ""
    yield f"{len(canaries)} random phrases{words} were drawn before training."
    coins = "coin" in results.roster and results.roster["coin"].notna().any()
    yield f"{planted} of them were in the training data{', by fair coins' if coins else ''};"
    yield f"the other {len(canaries) - planted} are controls, which training never saw."
    beginning = "" if known is None else f" from the first {f'{known} words' if known > 1 else 'word'}"
    yield f"An attacker ranks each phrase{beginning} among {subject.references:,} random phrases, by the model's"
    yield "probabilities."
    if results.is_elsewhere:
        yield "The model was trained elsewhere; that its training used exactly these records is assumed."


def _by_copies(canaries: pd.DataFrame) -> tuple[list[Column], list[list[Column]]]:
    lowest, rows = canaries["copies"].to_numpy(), list[dict[str, str]]()
    if len(np.unique(lowest)) > MOST_LINES:
        lowest = np.where(lowest > 0, 2 ** np.floor(np.log2(lowest.clip(1))), 0).astype(np.int64)
    for _, group in canaries.groupby(lowest):
        ends = sorted({int(group["copies"].min()), int(group["copies"].max())})
        hits, count, extracted = int(group["detected"].sum()), len(group), group["extracted"]
        low, high = share_interval(hits, count)
        rows.append(
            {
                FIRST: "none (controls)" if ends == [0] else "-".join(map(str, ends)),
                "Phrases": str(count),
                "Detected": str(hits),
                "95%": f"{100 * low:.0f}-{100 * high:.0f}%",
                "Extracted": UNKNOWN if extracted.isna().any() else str(int(extracted.sum())),
            }
        )
    names, *columns = (Column(head, [row[head] for row in rows], is_number=head != FIRST) for head in rows[0])
    return [names], [columns]


def _found(subject: Subject, canaries: pd.DataFrame) -> Iterator[str]:
    yield f"Detected: p-value at most {LEVEL:g}, corrected for {len(canaries)} phrases (Holm)."
    yield f"Smallest p-value: {canaries['p_value'].min():.2g}."
    yield "95%: interval of the share detected; it treats phrases as independent."
    if not canaries["extracted"].isna().any():
        yield f"Extracted: {WRITTEN.title} writes the phrase."
    if len(subject.control_ranks):
        area = auroc(-subject.ranks, -subject.control_ranks)
        yield f"A planted phrase ranks before a control with probability {area:.2f} (area under the ROC curve)."


def _follows(subject: Subject, canaries: pd.DataFrame) -> Iterator[str]:
    in_training, unit = canaries[canaries["copies"] > 0], subject.unit
    hits, extracted = in_training[in_training["detected"]], in_training[in_training["extracted"] == 1]
    if len(hits):
        least = copies(int(hits["copies"].min()))
        yield f"Memorization is proven: the model's probabilities show that phrases of {least} were in training."
    else:
        yield "Memorization is not proven: no phrase of the training data is detected."
    if len(extracted):
        least = copies(int(extracted["copies"].min()))
        phrases = "1 phrase" if len(extracted) == 1 else f"{len(extracted)} phrases, the rarest"
        yield f"Extraction is possible: the model writes {phrases} of {least}."
    frame = audit_subject(subject).frame
    rows = frame.query("kind == 'bound' and low > 0").to_dict("records")
    bounds = [(row, FROM[row["method"]]) for row in rows if row["method"] in FROM]
    for row, how in bounds:
        yield (
            f"Training does not give one {unit} differential privacy with epsilon below {row['low']:.2f} "
            f"(delta {row['delta']:g}, 95% confidence, from {how})."
        )
    if subject.claim:
        refuting = frame.loc[frame["refuted"].fillna(False), "method"].unique()
        verdict = f"refuted by the tests {', '.join(refuting)}" if len(refuting) else "no test refutes it"
        yield f"{subject.claim.stated(unit)}; {verdict}."
    if not bounds:
        yield f"A loss of privacy of one {unit} is not proven: no lower bound on epsilon is above 0."
    alarms = int(canaries.loc[canaries["copies"] == 0, "detected"].sum())
    if alarms:
        yield f"Something is wrong: {alarms} controls are detected. Was their text in the training data after all?"


def _open(subject: Subject, canaries: pd.DataFrame) -> Iterator[str]:
    in_training = canaries[canaries["copies"] > 0]
    hits, count = int(in_training["detected"].sum()), len(in_training)
    share = upper_bound(hits, count, LEVEL)
    if hits < count:
        yield (
            f"That {'other' if hits else 'these'} phrases are not memorized: of phrases such as these, up to "
            f"{100 * share:.0f}% may be detectable (95% confidence), and stronger attacks may find more."
        )
    yield "Anything about real records: they differ from random phrases in length, in content and in repetition."
    yield f"An upper bound on the loss of privacy of one {subject.unit}: an attack proves only lower bounds."
    yield (
        "A legal assessment of the model. For a reader who assesses it, for example with EDPB Opinion 28/2024 on AI "
        "models, this page is technical evidence, and not the assessment."
    )
