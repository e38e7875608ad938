"""What a round reveals, as tables: words, rare words, records and canaries by size of the sum and view."""

from pathlib import Path

from flsim.attacks.result import text_of
from flsim.attacks.reveal.records import CANARY, RECORD
from flsim.attacks.reveal.reveal import RARE, RARE_WORDS, WORDS, Revealed
from flsim.attacks.reveal.sums import CLIPPED, PLAIN
from flsim.show.table import Field, table_of

SUBJECTS = {
    WORDS: "Words of the users in a sum",
    RARE_WORDS: f"Rare words, which at most {RARE} training users have",
    RECORD: "Records: is this record in the sum?",
    CANARY: "Canaries: is this canary in the sum?",
}
LABELS = (Field("Users", "users", "{:,}"), Field("Sum", "sum"))
AUROC = Field("AUROC", "auroc", "{:.3f}", ends=("auroc_low", "auroc_high"))
BLIND = Field("Blind", "blind_auroc", "{:.3f}")
OF_WORDS = (
    [AUROC],
    [BLIND, Field("Others", "other_auroc", "{:.3f}"), Field("Permuted", "permuted_auroc", "{:.3f}")],
    [Field("Prec. %", "precision", "{:.1f}", 100), Field("Blind", "blind_precision", "{:.1f}", 100)],
    [Field("Recall %", "recall", "{:.1f}", 100), Field("Blind", "blind_recall", "{:.1f}", 100)],
    [Field("Spearman", "spearman", "{:.2f}"), Field("Blind", "blind_spearman", "{:.2f}")],
)
OF_RECORDS = (
    [Field("In", "n_in", "{:,.0f}"), Field("Out", "n_out", "{:,.0f}")],
    [AUROC, BLIND],
    *(
        [
            Field(
                f"% at {100 * level:g}%",
                f"tpr_at_{level}",
                "{:.1f}",
                100,
                (f"tpr_low_at_{level}", f"tpr_high_at_{level}"),
            ),
            Field("Out %", f"fpr_at_{level}", "{:.1f}", 100),
            Field("Allowed", f"allowed_at_{level}", "{:.1f}", 100),
        ]
        for level in (0.01, 0.05)
    ),
)
ABOUT_WORDS = (
    "AUROC: probability that a word of these users scores above another word, with Student's t interval over sums of "
    "this size, if there are three or more. Blind: the same for word frequencies without an update. Others: the update "
    "against the words of other users. Permuted: the update with exchanged words. Prec. and recall: of the guessed set "
    "of words. Spearman: rank correlation with the numbers of occurrences."
)
ABOUT_RECORDS = (
    "In, Out: numbers of tests of records inside and outside the sums. % at 5%: percentage of records inside with an "
    "exact p-value of at most 5%, with the interval of Clopper and Pearson, which treats records as independent. Out "
    "%: the same percentage of records outside. The p-value of a canary is exact if no previous round used the canary. "
    "Allowed: the largest percentage that the noise of this round allows any attacker who knows all other users. "
    "Blind: AUROC of the mean frequency of a record's words."
)


def sum_name(view: str, noise_multiplier: float) -> str:
    """Return the name of a view, such as ``"noised z=0.5"``."""
    return view if view in (PLAIN, CLIPPED) else f"{view} z={noise_multiplier:g}"


def to_text(revealed: Revealed) -> str:
    texts = []
    for (run, subject), rows in revealed.frame.groupby(["run", "subject"], sort=False):
        first = rows.iloc[0]
        named = rows.assign(sum=[sum_name(*pair) for pair in zip(rows["view"], rows["noise_multiplier"], strict=True)])
        title = (
            f"{first['setting']} ({Path(str(run)).resolve().name}), round {first['round']:,}. {SUBJECTS[str(subject)]}"
        )
        fields = OF_WORDS if subject in (WORDS, RARE_WORDS) else OF_RECORDS
        texts.append(text_of(title, [table_of(named, LABELS, fields)]))
    subjects = set(revealed.frame["subject"])
    about = [ABOUT_WORDS] * (WORDS in subjects) + [ABOUT_RECORDS]
    return "\n".join([*texts, text_of(about[0], [], [*about[1:], *revealed.notes])])
