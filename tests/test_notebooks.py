"""Notebooks of the documentation run, and their stored outputs belong to their current code."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import notebooks
import pytest

# Replacements of code, with which each notebook runs in seconds. Each replaced text is in at least one notebook.
SHORTER = {
    "make_corpus(folder, seed=0)": "make_corpus(folder, seed=0, users=40, words_per_user=60, test_users=4)",
    "rounds, seeds = 160, (0, 1, 2)": "rounds, seeds = 4, (0, 1)",
    "rounds, delta = 80,": "rounds, delta = 2,",
    "rounds = 80": "rounds = 2",
    "cohort=20": "cohort=4",
    "cohort=40": "cohort=4",
    "CanaryUsers(50,": "CanaryUsers(10,",
    "planted, model, algorithm, 10, seed=0, every=10": "planted, model, algorithm, 1, seed=0, every=1",
    "count=12": "count=2",
    "references=2_000": "references=20",
}
NOTEBOOKS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in notebooks.notebooks()}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_belong_to_the_current_code(name: str) -> None:
    """The stored digest is that of the current code. If this fails, run: python .ci/notebooks.py."""
    notebook = NOTEBOOKS[name]
    nbformat.validate(notebook)
    assert notebook["metadata"]["digest"] == notebooks.digest(notebook)
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}  # no error
    assert {output["name"] for output in outputs if "name" in output} == {"stdout"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(notebooks.code_of(NOTEBOOKS[name]))
    assert not re.search(r"(from|import) flsim\.(?!measures|models)", code)  # public names, and those of custom code
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    with plt.rc_context():
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
        assert plt.get_fignums()
        plt.close("all")


def test_each_shorter_setting_is_in_a_notebook() -> None:
    code = "\n".join("\n".join(notebooks.code_of(notebook)) for notebook in NOTEBOOKS.values())
    assert [setting for setting in SHORTER if setting not in code] == []


def test_a_page_of_the_site_has_text_code_printed_lines_and_figures() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [{"text": ["1\n"]}, {"data": {"image/png": "AAAA\n"}}],
        },
    ]
    page = "# Title\nText.\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n![Figure](data:image/png;base64,AAAA)\n"
    assert notebooks.markdown(json.dumps({"cells": cells})) == page
