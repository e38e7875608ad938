"""Tests execute the tutorials on models that were trained elsewhere, "elsewhere.md" and "flower-app.md", unchanged."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from documents import ROOT, Block, blocks_of, commands_of
from flower_commands import Flower, wait_until
from helpers import Experiment
from raynodes import free_port

from flsim.attacks.audit.audit import subject_of
from flsim.attacks.audit.summary import detected_canaries

pytestmark = pytest.mark.slow
PAGE, FLOWER_APP = (ROOT / "docs" / name for name in ("elsewhere.md", "flower-app.md"))


def saved(block: Block, folder: Path) -> None:
    path = folder / block.text.splitlines()[0].removeprefix("# ")
    path.parent.mkdir(exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Run the complete page; return its folder, and the output of each command."""
    folder, outputs = tmp_path_factory.mktemp("elsewhere"), {}
    for block in blocks_of(PAGE):
        if block.language == "python":
            saved(block, folder)
        elif block.language == "sh":
            for program, *words in commands_of(block):
                if program == "flsim":
                    outputs[" ".join(words)] = Experiment(folder).call(*words).stdout
                else:
                    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=True)
    return folder, outputs


def test_the_page_runs_and_its_training_does_not_use_flsim(done: tuple[Path, dict[str, str]]) -> None:
    folder, outputs = done
    assert "flsim" not in (folder / "train.py").read_text().replace("without flsim", "")
    assert (folder / "exposure.png").stat().st_size
    assert "| epsilon, coins" in outputs["audit runs/theirs"]


def test_the_summary_equals_that_on_the_page_except_numbers(done: tuple[Path, dict[str, str]]) -> None:
    """Sentences and the shape of the table are equal. Numbers differ slightly between processors."""
    shown = next(block.text for block in blocks_of(PAGE) if block.language == "text")
    assert shape(shown) == shape(done[1]["audit runs/theirs --summary"])


def shape(text: str) -> list[str]:
    words = " ".join(text.split()).replace("|", " ").split()
    return [word.strip(".,%") for word in words if not any(letter.isdigit() for letter in word) and word.strip("-:")]


def test_detections_and_copies_equal_a_second_computation(done: tuple[Path, dict[str, str]]) -> None:
    """Expected detections apply Holm's step-down procedure, as in his paper, to p = rank / (R + 1) in Parquet files."""
    folder = done[0] / "runs" / "theirs"
    rows = pd.read_parquet(sorted((folder / "rows").iterdir())[-1])
    ranks = rows[rows["metric"] == "rank"].set_index("canary")["value"].sort_values()
    detected = list[str]()
    for place, (canary, rank) in enumerate(ranks.items()):
        if rank / 2001 > 0.05 / (len(ranks) - place):
            break
        detected.append(str(canary))
    found = detected_canaries(subject_of(folder))
    assert sorted(map(str, found.index[found["detected"]])) == sorted(detected)
    listed = pd.read_json(done[0] / "planted" / "records.jsonl", lines=True)["canary"].value_counts()
    assert found["copies"].to_dict() == {canary: int(listed.get(canary, 0)) for canary in found.index}
    assert not found[found["copies"] == 0]["detected"].any()
    assert found[found["copies"] == 8]["detected"].all()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """Run the page on a Flower app; yield its folder, and the output of each of its blocks of commands."""
    flower, outputs = Flower(tmp_path_factory.mktemp("flower")), list[str]()
    port = str(free_port())
    environment = flower.environment | {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port}
    at = ("--host", "127.0.0.1", "--port", port)
    try:
        # `flwr run` starts the SuperLink like this, but waits only 15 seconds, too short for a busy machine.
        flower.start("flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess", *at)
        wait_until(lambda: flower.is_up(port), flower)
        for block in blocks_of(FLOWER_APP):
            if block.language == "sh":
                command = ["bash", "-euo", "pipefail", "-c", block.text]
                ran = subprocess.run(command, cwd=flower.folder, env=environment, capture_output=True, text=True)
                assert ran.returncode == 0, ran.stdout + ran.stderr
                outputs.append(ran.stdout + ran.stderr)
            else:
                saved(block, flower.folder)
        yield flower.folder, outputs
    finally:
        flower.close()


@pytest.mark.nightly  # a busy machine starts a SuperLink and ten clients too slowly
def test_a_flower_app_is_trained_by_flower_and_audited(app: tuple[Path, list[str]]) -> None:
    """The app does not use flsim. Phrases with eight copies are detected, and controls are not."""
    folder, outputs = app
    assert not any("flsim" in path.read_text() for path in (folder / "pytorchexample").glob("*.py"))
    subject = subject_of(folder / "runs" / "app")
    assert subject.results.evaluated == [0, 2, 4, 6, 8]
    found = detected_canaries(subject)
    assert not found[found["copies"] == 0]["detected"].any()
    assert found[found["copies"] == 8]["detected"].all()
    assert (folder / "exposure.png").stat().st_size
    assert "Memorization is proven" in outputs[-1]
    assert "Something is wrong" not in outputs[-1]
    assert not detected_canaries(subject_of(folder / "runs" / "app", 0))["detected"].any()
