"""docs/extending.md as it stands: five things of a user's own, from a dump to a report, killed in the middle."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Experiment, assert_same, wait_for_round

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"my_model": "models", "my_measure": "measures", "my_algorithm": "algorithms", "my_optimizers": "optimizers"}


def block_of(name: str, language: str) -> str:
    """The first block of code in a document."""
    return (DOCS / name).read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


@pytest.mark.nightly
def test_everything_of_ones_own_goes_from_a_dump_to_a_report(tmp_path: Path) -> None:
    for file, page in {**PAGES, "my_corpus": "corpora"}.items():
        (tmp_path / f"{file}.py").write_text(block_of(f"{page}.md", "python"))
    (tmp_path / "all.toml").write_text(block_of("extending.md", "toml"))
    subprocess.run([sys.executable, "-c", block_of("extending.md", "python")], cwd=tmp_path, check=True)
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    commands = [line.split() for line in re.findall(r"^    flsim (.*)$", text, re.MULTILINE)]
    by_name = {" ".join(command[:1]): command for command in commands if "--resume" not in command}
    place = Experiment(tmp_path)

    place.flsim(*by_name["data"])
    command = [sys.executable, "-m", "flsim", *by_name["run"]]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "runs" / "all"
    workers = wait_for_round(run, 3)
    assert len(workers) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    changed = (tmp_path / "my_algorithm.py").read_text()
    (tmp_path / "my_algorithm.py").write_text(changed.replace("+ 1", "+ 2"))
    refused = place.flsim(*by_name["run"], "--resume", check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "was started with another version of" in refused.stderr
    (tmp_path / "my_algorithm.py").write_text(changed)
    (resume,) = (command for command in commands if "--resume" in command)
    place.flsim(*resume)
    place.flsim("run", "all.toml", "--out", "runs/whole")
    assert_same(run, tmp_path / "runs" / "whole")

    said = place.flsim(*by_name["table"]).stdout
    assert all(part in said for part in ("Counting+Normalized", "TwistedGRU", "Surpr."))
    for name in ("plot", "report"):
        place.flsim(*by_name[name])
    assert (tmp_path / "all.png").stat().st_size > 10_000
    assert "Log-perplexity of a canary, per word that is not known." in (tmp_path / "all.html").read_text()
