"""Benchmark of false alarms: how often lower bounds of flsim and of other projects exceed a known true value."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.alarms.cases import most_alarms
from benchmarks.alarms.elsewhere import ELSEWHERE
from benchmarks.alarms.ours import ESTIMATES, OURS
from flsim.base.progress import progress

SIMULATIONS = 2_000
MARK = "\\*"


def bench_alarms(simulations: int = SIMULATIONS) -> dict[str, Any]:
    """Return how many bounds are above the truth, as values for JSON.

    Args:
        simulations: number of simulations of each bound and truth.
    """
    figures: dict[str, list[dict[str, Any]]] = {"bounds": [], "estimates": [], "elsewhere": []}
    with progress("false alarms", len(OURS) + len(ESTIMATES) + len(ELSEWHERE), unit="bounds") as advance:
        for kind, cases in (("bounds", OURS), ("estimates", ESTIMATES)):
            for case in cases:
                described = {"bound": case.bound, "truth": case.truth, "promised": case.promised}
                figures[kind].append(described | {"alarms": case.alarms(simulations)})
                advance(sum(map(len, figures.values())))
        for other in ELSEWHERE:
            other_alarms, ours = other.alarms(simulations)
            described = {"project": other.project, "source": other.source, "procedure": other.procedure}
            figures["elsewhere"].append(
                described | {"promised": other.promised, "alarms": other_alarms, "alarms_of_ours": ours}
            )
            advance(sum(map(len, figures.values())))
    return {"simulations": simulations, **figures}


def describe(measured: dict[str, Any]) -> str:
    """Return the results as tables in Markdown, with a mark if noise does not explain the number of alarms."""
    simulations = measured["simulations"]

    def share(alarms: int, promised: float | None) -> str:
        is_more = promised is not None and alarms > most_alarms(promised, simulations)
        return f"{100 * alarms / simulations:.1f}%{f' {MARK}' * is_more}"

    def rows(kind: str) -> Iterator[Sequence[str]]:
        for figure in measured[kind]:
            promised = figure["promised"]
            yield (
                f"`{figure['bound']}`",
                figure["truth"],
                share(figure["alarms"], promised),
                "nothing" if promised is None else f"{promised:.0%}",
            )

    others = [
        (
            *(figure["project"], figure["procedure"], share(figure["alarms"], figure["promised"])),
            *(share(figure["alarms_of_ours"], figure["promised"]), f"{figure['promised']:.0%}"),
        )
        for figure in measured["elsewhere"]
    ]
    of_ours = ("Bound", "Truth", "False alarms", "Permitted")
    return "\n\n".join(
        [
            f"{simulations:,} simulations of each row.",
            table(of_ours, [*rows("bounds")]),
            table(of_ours, [*rows("estimates")]),
            table(("Project", "Procedure", "False alarms", "flsim", "Permitted"), others),
            f"{MARK} More than three standard deviations above the permitted percentage.",
        ]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; shares are to the right."""
    is_share = [index >= len(head) - (3 if "flsim" in head else 2) for index in range(len(head))]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * (width - share) + ":" * share for width, share in zip(widths, is_share, strict=True)], *rows]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if share else cell.ljust(width)
            for cell, width, share in zip(line, widths, is_share, strict=True)
        )
        + " |"
        for line in lines
    )
