"""The sentences on a search stand below tables for people, and in no table for machines."""

from collections.abc import Callable
from pathlib import Path

from flsim.results import formats, seeds_table, tables
from flsim.results.display_columns import TUNED
from flsim.results.store import read_run
from flsim.results.tables import memorization_table

NOTE = "Settings were chosen by perplexity on test users alone, never by canaries (search 0123456789ab): a rate 0.4."


def test_the_note_on_a_search_is_below_tables_for_people(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run({10: {"rs": [1.0] * 9, "bs": [0.0] * 9, "exposure": [1.0] * 9}}, seed=0, series="s"))
    for table, kind in (
        (memorization_table([run]), tables),
        (seeds_table.seeds_table([run]), seeds_table),
    ):
        plain, latex, csv = kind.to_markdown(table), kind.to_latex(table), formats.to_csv(table)
        assert "Settings were chosen" not in plain
        table.attrs[TUNED] = [NOTE]
        text = kind.to_markdown(table)
        assert text.startswith(plain)
        added = text.removeprefix(plain)
        assert " ".join(added.split()) == NOTE
        assert max(map(len, added.splitlines())) <= 80
        assert latex != kind.to_latex(table)
        assert NOTE in " ".join(kind.to_latex(table).replace("%", "").split())
        assert formats.to_csv(table) == csv
