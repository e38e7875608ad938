"""Texts that others chose, such as names of runs, titles and words, stay texts in all that is written of them."""

import json
import re
from pathlib import Path

import pandas as pd
from reported import roster, write_run
from selectolax.lexbor import LexborHTMLParser

from flsim.report.gather import gather
from flsim.report.page import render
from flsim.results.store import read_run
from flsim.show.table import Column, latex, markdown, to_csv

HOSTILE = (
    """<script>alert(1)</script><img src=//x onerror=alert(1)>"onload="a' {{7*7}} """
    "| `$(x)` [a](b) \\input{/etc/passwd} =1+1"
)


def test_a_report_holds_no_script_whatever_runs_are_called(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    path = write_run(sweep / "runs" / "a", setting=f"IID, {HOSTILE}", reason=HOSTILE, name="a", status="completed")
    planted = roster(0)
    planted["words"] = planted["words"].map(lambda words: [HOSTILE, *words[1:]])
    planted.to_parquet(path / "planted" / "roster.parquet")
    one = {"name": "a", "grid": HOSTILE, "seed": 0, "axes": {HOSTILE: HOSTILE}, "published": None}
    said = dict.fromkeys(("name", "title", "question", "tier", "about", "command", "source"), HOSTILE)
    session = {"began": HOSTILE, "seconds": 1.0, "trained": ["a"], "failed": {HOSTILE: HOSTILE}}
    about = {**said, "versions": {HOSTILE: HOSTILE}, "sessions": [session], "runs": [one, one | {"name": "b"}]}
    (sweep / "sweep.json").write_text(json.dumps(about))
    line = {"checkpoint": "round-000040.safetensors", "outcome": "failed", "attempt": 1, "seconds": 1.0, "ended": 1.0}
    (path / "evaluations.jsonl").write_text(json.dumps(line | {"reason": HOSTILE}))
    page = render(gather([sweep]))
    tree = LexborHTMLParser(page)
    title = tree.css("h1")[0].text()
    assert HOSTILE.split()[0] in title  # it was shown, as a text
    assert page.count("&lt;script&gt;") > 10
    assert "{{7*7}}" in title
    nodes = tree.css("*")
    assert {node.tag for node in nodes} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "form",
        "base",
    } == set()
    named = [name for node in nodes for name in node.attributes]
    assert [name for name in named if name.startswith("on")] == []
    assert {str(node.attributes["href"])[:1] for node in nodes if "href" in node.attributes} == {"#"}
    policy = tree.css('meta[http-equiv="Content-Security-Policy"]')[0].attributes["content"]
    assert "default-src 'none'" in str(policy)


def test_tables_hold_no_markup_whatever_runs_are_called() -> None:
    labels, units = [Column("Setting", [HOSTILE], is_number=False)], [[Column("RS", ["1"])]]
    row = markdown(labels, units, width=1_000).splitlines()[2]
    assert re.sub(r"\\.", "", row).count("|") == 3  # the cells' own borders
    assert not re.search(r"(?<!\\)(<\w|`|\[)", row)
    text = latex(labels, units)
    commands = set(re.findall(r"\\[A-Za-z]+", text))
    assert "\\input" not in commands
    assert "textbackslash{}input" in text


def test_a_csv_holds_names_as_they_are(tmp_path: Path) -> None:
    """Exactly, which is what it is for; docs/security.md says what a spreadsheet may make of one."""
    run = write_run(tmp_path / "run", setting="=1+1")
    table = pd.DataFrame({"setting": [read_run(run).setting]})
    assert to_csv(table) == "setting\n=1+1\n"
