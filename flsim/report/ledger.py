"""Section of a report on privacy: every epsilon with the convention that it follows."""

from flsim.privacy.conventions import CONVENTIONS
from flsim.report.blocks import Block, Cell, Heading, Prose, Table, left, number
from flsim.report.gather import Gathered, RunView, Setting


def privacy(gathered: Gathered) -> list[Block]:
    """Return the section on each setting's mechanism, and on each epsilon with its convention."""
    named = {convention.name: convention for convention in CONVENTIONS}
    rows: list[list[Cell]] = []
    without = []
    for setting in gathered.settings:
        epsilons = _epsilons(setting)
        if not epsilons:
            without.append(setting.label)
        for unit, name, epsilon, delta, round_, run in epsilons:
            how = named.get(name)
            about = (
                [how.sampler, how.relation, how.sensitivity, how.accountant, how.conversion or "–"]
                if how
                else ["–"] * 5
            )
            noise = number(run.config.privacy.noise_multiplier if run.config else None, "{:g}")
            rows.append(
                [
                    setting.label,
                    name,
                    number(epsilon, "{:.4g}"),
                    number(delta, "{:.3g}"),
                    unit,
                    *about,
                    noise,
                    f"{round_:,}",
                ]
            )
    blocks: list[Block] = []
    if rows:
        headings = [left("Setting"), left("Convention"), Heading("ε"), Heading("δ")]
        headings += [
            left(text) for text in ("Of one", "Sampler", "Relation", "Sensitivity", "Accountant", "Conversion")
        ]
        headings += [Heading("Noise z"), Heading("Rounds")]
        note = (
            "An ε has no meaning without its convention. “paper” is the paper’s: it takes S as the sensitivity to "
            "replacing a user, which can be 2S; the other convention is correct. No convention accounts for choosing "
            "settings on the same data, and the noise of a simulation is a function of its seed."
        )
        blocks.append(Table("What was spent, by convention, at the last evaluation", headings, rows, note))
    configs = [run.config for setting in gathered.settings for run, _ in setting.shown_runs if run.config]
    notes = {config.canaries.about_injections for config in configs if config.privacy.mechanism == "dp"}
    blocks += [Prose(note, is_note=True) for note in sorted(filter(None, notes))]
    if without and rows:
        blocks.append(Prose(f"Without noise, so that ε is infinite: {'; '.join(without)}.", is_note=True))
    if not rows:
        blocks.append(Prose("No run added noise, so no ε is finite: nothing here is differentially private."))
    return blocks


def _epsilons(setting: Setting) -> list[tuple[str, str, float, float | None, int, RunView]]:
    """Return unit, convention, epsilon, delta, round and run, from the rows of the first shown run."""
    for run, round_ in setting.shown_runs[:1]:
        rows = run.results.rows
        spent = rows[(rows["round"] == round_) & (rows["canary"] == "") & rows["metric"].str.contains("epsilon ")]
        return [
            (
                "record" if metric.startswith("record ") else "user",
                metric.removeprefix("record ").removeprefix("epsilon "),
                float(value),
                run.results.of_model("record delta" if metric.startswith("record ") else "delta", round_),
                round_,
                run,
            )
            for metric, value in zip(spent["metric"], spent["value"], strict=True)
        ]
    return []
