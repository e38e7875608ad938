"""If an import's machine loses power after any step, repeating the command gives the same, complete corpus."""

import json
import random
import sys
from pathlib import Path

import pytest
from power.recording import record
from power.replaying import HEAD, IS_WHOLE, replay
from power.resuming import command

from flsim.base.progress import say
from flsim.data.corpus import Corpus

SAMPLE = 24


def write_posts(path: Path) -> None:
    """Write posts by 12 authors, each of whom wrote enough for two users."""
    rng = random.Random(0)
    words = [f"w{number}" for number in range(30)]
    posts = [{"user": f"u{author}", "text": " ".join(rng.choices(words, k=12))} for author in range(12) for _ in "1234"]
    path.write_text("".join(json.dumps(post) + "\n" for post in posts))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_import_that_lost_power_gives_the_same_corpus(tmp_path: Path, workers: int) -> None:
    source, folder = tmp_path / "posts.jsonl", tmp_path / "recorded"
    write_posts(source)
    folder.mkdir()
    arguments = ["data", "import", str(source), "--vocabulary", "20", "--words-per-user", "24", "--workers"]
    ops = record([sys.executable, "-m", "flsim", *arguments, str(workers), "--out", str(folder / "corpus")], folder)
    whole = Corpus.open(folder / "corpus", verify=True).digest

    def go_on(state: Path) -> str:
        out = state / "corpus"
        code, said = command(*arguments, "1", "--out", out)
        line = said.splitlines()[-1]
        assert code == 0 or (code == 2 and "already exists; name another folder" in line), said
        assert Corpus.open(out, verify=True).digest == whole
        assert code or [path.name for path in state.iterdir()] == ["corpus"]
        return "there" if code else "continued" if "continuing" in said else "begun again"

    name = f"import, {workers} process{'es' * (workers > 1)}"
    made = replay(name, ops, tmp_path, go_on, None if IS_WHOLE else SAMPLE)
    say(f"\n{HEAD}\n{made.row()}\n")
    assert not made.wrong, json.dumps(made.wrong, indent=2)
    assert made.ends["continued"]
    assert made.last == {"there": made.last.total()}, "the command had ended, and the corpus was not safe"
