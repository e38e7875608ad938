"""What a round reveals, as tables and a figure, by the size of the sum and the view."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from flsim.attacks.result import text_of
from flsim.attacks.reveal.reveal import CANARY, CLIPPED, KEY, PLAIN, RARE, RARE_WORDS, RECORD, WORDS, Revealed
from flsim.show.figure import legend_below, line_style, plain, subplots
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


# Figure of what a round reveals against the number of users of a sum, by clip and noise.

LEVEL = 0.05
DETECTED = (f"tpr_at_{LEVEL}", (f"tpr_low_at_{LEVEL}", f"tpr_high_at_{LEVEL}"), None, LEVEL)
PANELS = {  # by subject: label of the y axis, column, its interval, column of the blind line, level of chance
    RARE_WORDS: ("AUROC of rare words", "auroc", ("auroc_low", "auroc_high"), "blind_auroc", 0.5),
    RECORD: (f"records, % with p <= {LEVEL:g}", *DETECTED),
    CANARY: (f"canaries, % with p <= {LEVEL:g}", *DETECTED),
}


def draw(revealed: Revealed) -> Figure:
    """Return a figure with a column for each run, rows for rare words, records and canaries, and lines for views."""
    frame = revealed.frame.fillna({"noise_multiplier": 0.0})
    runs = list(dict.fromkeys(frame["run"]))
    shown = [subject for subject in PANELS if subject in set(frame["subject"])]
    views = list(dict.fromkeys(zip(frame["view"], frame["noise_multiplier"], strict=True)))
    width, height = max(5.0, 3.4 * len(runs)), 2.6 * len(shown) + 1.2
    figure, all_axes = subplots(width, height, len(shown), len(runs), sharex="col", sharey="row")
    for column, run in enumerate(runs):
        of_run = frame[frame["run"] == run]
        for row, subject in enumerate(shown):
            axes, (label, value, ends, blind, chance) = all_axes[row, column], PANELS[subject]
            rows = of_run[of_run["subject"] == subject]
            scale = 1 if value == "auroc" else 100
            for (view, multiplier), of_view in rows.groupby(KEY[1:], sort=False):
                name = plain(sum_name(str(view), float(multiplier)))
                style = line_style(views.index((view, multiplier))) | {"markersize": 4, "label": name}
                (line,) = axes.plot(of_view["users"], scale * of_view[value], **style)
                band = [scale * of_view[end] for end in ends]
                axes.fill_between(of_view["users"], *band, color=line.get_color(), alpha=0.1, linewidth=0)
            if blind is not None:
                first = rows.drop_duplicates("users")
                axes.plot(first["users"], first[blind], color="#8a8a83", linestyle=(0, (4, 2)), label="blind")
            axes.axhline(scale * chance, color="#555555", linestyle=(0, (1, 2)), linewidth=1)
            axes.set_xscale("log")
            sizes = sorted(set(rows["users"]))  # without those whose label would overlap the next one
            ticks = [size for size, after in zip(sizes, [*sizes[1:], math.inf], strict=True) if after >= 1.5 * size]
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
            if row == 0:
                axes.set_title(plain(f"{of_run['setting'].iloc[0]}\nround {of_run['round'].iloc[0]}"), fontsize=10)
            if row == len(shown) - 1:
                axes.set_xlabel("users in the sum")
            if column == 0:
                axes.set_ylabel(label)
    legend_below(figure, all_axes.flat, 3)
    return figure
