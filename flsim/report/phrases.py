"""The extracted canaries of a report, in words."""

from flsim.measures.quantity import Quantity, flags
from flsim.report.blocks import Block, Cell, Fold, Heading, Table, left, plural
from flsim.report.gather import Gathered, RunView

EXTRACTED = "extracted"  # the outcome of a flag by which a phrase can be read off the model
FEW = 8  # rows that are shown at once; more are folded
MOST = 20  # phrases of a run


def extracted(gathered: Gathered) -> list[Block]:
    """Return a table of the phrases that were extracted from each run's last evaluated model; none where none was."""
    extracting = [flag for flag in flags(gathered.quantities) if flag.outcome == EXTRACTED]
    blocks: list[Block] = []
    for flag in extracting:
        rows: list[list[Cell]] = []
        for setting in gathered.settings:
            for run, round_ in setting.shown_runs:
                phrases = _phrases(run, flag, round_)
                if phrases:
                    named = "; ".join(f"“{phrase}”" for phrase in phrases[:MOST])
                    more = f"; and {len(phrases) - MOST} more" if len(phrases) > MOST else ""
                    rows.append([setting.label, run.results.name, f"{len(phrases)}", named + more])
        if rows:
            headings = [left("Setting"), left("Run"), Heading("Canaries"), left("Phrases, by their ids")]
            note = "Whole phrases; `flsim canaries RUN` lists all canaries of a run."
            table = Table(f"Canaries {flag.outcome} by {flag.title}, in words", headings, rows, note)
            blocks.append(table if len(rows) <= FEW else Fold(f"Phrases of {plural(len(rows), 'run')}", [table]))
    return blocks


def _phrases(run: RunView, flag: Quantity, round: int) -> list[str]:
    """Return the phrases of the canaries with a flag at an evaluation; none where the run does not know its words."""
    roster, values = run.results.roster, run.results.of_canaries(flag.name, round)
    if values is None or "words" not in roster:
        return []
    return [" ".join(words) for words in roster.loc[(values == 1).to_numpy(), "words"]]
