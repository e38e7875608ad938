"""Pages whose commands are marked to run, run: each page in a folder of its own, block after block.

Commands run in this process. Runs train and evaluate here too, without Ray (`power.resuming.without_ray`), and for
fewer rounds than the page says.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from documents import ROOT, RUNS, SAVED_AS, blocks_of, commands_of, written_documents
from helpers import Flsim
from power.resuming import without_ray

SLOW = {"tutorial-language-model.md"}
PAGES = [
    pytest.param(path, marks=pytest.mark.slow if path.name in SLOW else (), id=path.name)
    for path in written_documents()
    if any(block.mark == RUNS for block in blocks_of(path))
]
DEMO = "flsim demo --out runs/demo"
SMALL = ("canaries.count=1", "training.cohort=8", "evaluation.every_epochs=0.04", "evaluation.references=100")
SHORTER: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        "count=12": "count=1",
        "cohort=20": "cohort=8",
        "rounds=200": "rounds=2",
        "every=200": "every=2",
        "20_000": "100",
    },
    "first-run.md": {
        DEMO: f"{DEMO} --set training.rounds=4 {' '.join(f'--set {setting}' for setting in SMALL)}",
        "round-000200": "round-000004",
        "c43": "c3",
        "--round 200": "--round 4",
        "--also space": "--also space --samples 20 --nodes 20",
    },
    "dp.md": {
        "--rounds 7840": "--rounds 100",
        "--epsilon 8 --delta 1e-5 --sampler poisson": "--epsilon 8 --delta 1e-5 --sampler fixed-size",
        "--rounds 300": "--rounds 30",
    },
    "dp-ftrl.md": {"--rounds 160": "--rounds 20", "--epsilon 8": "--noise-multiplier 4.5"},
    "participation.md": {
        "--rounds 160 --epsilon 8": "--rounds 16 --noise-multiplier 1",
        "seed=0)": "seed=0, users=60)",
    },
    "tutorial-language-model.md": {"epochs = 3": "epochs = 1", "rounds = 40": "rounds = 4", "every = 20": "every = 2"},
    "own-data.md": {"rounds = 40": "rounds = 4", "every = 20": "every = 2", "references = 2000": "references = 100"},
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flsim: Flsim) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "experiments", "experiments")
    shorter = dict(SHORTER.get(page.name, {}))
    used = set()
    for block in blocks_of(page):
        if block.mark != RUNS and not block.mark.startswith(SAVED_AS):
            continue
        text = block.text
        for old, new in shorter.items():
            used |= {old} if old in text else set()
            text = text.replace(old, new)
        if block.mark.startswith(SAVED_AS):
            Path(block.mark.removeprefix(SAVED_AS)).write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(text, str(block), "exec"), {"__name__": "__main__"})
        else:
            for command in commands_of(type(block)(block.document, block.line, "sh", text, RUNS)):
                assert command[0] == "flsim", command
                with without_ray():
                    code, _, err = flsim(*command[1:])
                assert code == 0, err
    assert used == set(shorter)
