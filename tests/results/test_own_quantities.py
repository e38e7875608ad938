"""Quantities of a user's own measures over seeds: means, intervals and tests, as of exposure and RS."""

import re
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from shown import to_latex, to_markdown

from flsim.measures.quantity import Quantity
from flsim.report.gather import gather
from flsim.report.page import render
from flsim.results.differences import Pair, differences, planned, to_wide
from flsim.results.rows import Row, write_rows
from flsim.results.store import RunResults, read_run
from flsim.results.tables import memorization_table
from flsim.show.differences import compare_partitions, table_of_pairs
from flsim.show.plots import draw_rounds

MakeRun = Callable[..., Path]
CANARIES = [f"c{index:02d}" for index in range(9)]
OWN = [
    Quantity(name="nats", unit="nats", description="Nats of a canary.", format="{:.3f}"),
    Quantity(name="seen", kind="flag", description="Whether it was seen.", heading="Seen"),
]


@pytest.fixture
def partitions(make_run: MakeRun) -> dict[str, list[RunResults]]:
    """Two seeds in both partitions: in IID each canary has one nat more, and of seed s, s more canaries are seen."""
    found: dict[str, list[RunResults]] = {"iid": [], "non-iid": []}
    for partition in found:
        for seed in (0, 1):
            name, more = f"{partition}-{seed}", partition == "iid"
            setting = {"iid": "IID, FedAvg, b_u=4", "non-iid": "Non-IID, FedAvg, b_u=4"}[partition]
            about = {"seed": seed, "series": partition, "partition": partition, "rounds_per_epoch": 1.0}
            folder = make_run({10: {"references": 1.0}}, name=name, shift=100 * seed, setting=setting, **about)
            rows = [Row(name, 10, "references", "", 10_000.0)]
            for index, canary in enumerate(CANARIES):
                seen = float(index < 3 + more * seed)
                values = {"exposure": index / 2, "nats": index + more + seed / 4, "seen": seen}
                rows += [Row(name, 10, metric, canary, value) for metric, value in values.items()]
            write_rows(folder, 10, rows, OWN)
            found[partition].append(read_run(folder))
    return found


def test_partitions_are_compared_over_seeds(partitions: dict[str, list[RunResults]]) -> None:
    pair = Pair("row", planned(partitions["iid"]), planned(partitions["non-iid"]))
    frame = differences([pair])
    row = to_wide(frame).iloc[0]
    assert (row["nats_difference"], row["over"]) == (1.0, "seeds")
    assert (row["seen_value_a"], row["seen_value_b"]) == (3.5, 3.0)
    assert row["seen_p"] == pytest.approx(row["seen_p_holm"])
    assert "nats, a-b" in table_of_pairs(frame, [pair]).markdown()
    assert "+1.000" in compare_partitions([*partitions["iid"], *partitions["non-iid"]])


def test_words_of_a_description_are_shown_as_they_stand(make_run: MakeRun) -> None:
    """What would be mathematics in a figure, the end of a cell in Markdown, a command in LaTeX, or markup in HTML."""
    words = r"a|b $\nothing{$ <i>"
    strange = replace(OWN[0], title=words, heading=words, short=words, unit=words, axis=words)
    folder = make_run({10: {"references": 1.0}}, name="run", seed=0)
    rows = [Row("run", 10, metric, id_, 1.0) for metric in ("exposure", "nats", "seen") for id_ in CANARIES]
    write_rows(folder, 10, [*rows, Row("run", 10, "references", "", 100.0)], [strange, OWN[1]])
    run = read_run(folder)
    draw_rounds([run]).savefig(BytesIO(), format="svg")
    table = memorization_table([run])
    lines = to_markdown(table, width=400).splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[:3]}) == 1
    assert r"\nothing" not in to_latex(table).split(r"\toprule")[1]
    page = render(gather([folder]))
    assert "Seen" in page[page.index('id="answer"') : page.index("<nav")]
    assert "a|b $" in page
    assert "<i>a" not in page
    assert "$ <i>" not in page
