"""Helpers for tests of interrupted imports: the real command in small pieces, which can be made to wait."""

import os
import subprocess
import sys
from pathlib import Path

from dumps import alive, children, write_jsonl
from waiting import hear_ctrl_c, wait_until

from flsim.base.rng import stream

# The real command, in pieces that are small enough for a test; that their sizes change nothing is tested elsewhere.
# When it has MOST pieces it waits, to be killed or let go: it might be over before a test that watches it has its turn.
COMMAND = """
import os, time
from pathlib import Path
from flsim.cli import main
from flsim.data.formats import posts
from flsim.data.importing import tasks
from flsim.base.pool import Pool
posts.PART_BYTES, tasks.PIECE, tasks.BUCKET, tasks.COUNTED = 60_000, 40_000, 60_000, 500
scratch, most, run = Path(os.environ["SCRATCH"]), float(os.environ["MOST"]), Pool.run

def run_until_most(pool, tasks, done, *report):
    def done_unless_most(index, value):
        while len(list(scratch.glob("*/*.json"))) >= most and not scratch.with_name("go").exists():
            time.sleep(0.01)
        done(index, value)
    run(pool, tasks, done_unless_most, *report)

Pool.run = run_until_most
main()
"""
FURTHER = 5  # pieces it may have more than are waited for: what is killed is at work, as a rule


class Imports:
    """An import that takes about thirty pieces, as often as is wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = stream(0, "test", "restart")
        self.sources = []
        for name in ("one", "two", "three"):
            posts = [
                (int(user), " ".join(f"w{word}" for word in rng.zipf(1.4, 60)) + ".")
                for user in rng.integers(0, 90, 600)
            ]
            self.sources.append(write_jsonl(folder / f"{name}.jsonl", posts))
        self.out = folder / "corpus"
        self.scratch = folder / ".corpus.importing"

    def start(
        self, *sources: Path, out: Path | None = None, most: float = float("inf"), **options: object
    ) -> "subprocess.Popen[str]":
        arguments = [*(sources or self.sources), "--out", out or self.out, "--vocabulary", 300, "--words-per-user", 200]
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "data", "import", *map(str, arguments), "--workers", "2"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SCRATCH": str(self.scratch), "MOST": str(most)},
            preexec_fn=hear_ctrl_c,
            **options,  # type: ignore[call-overload]
        )
        return process

    def run(self) -> str:
        """Import to the end. Returns what it said."""
        return self.finish(self.start())

    def finish(self, process: "subprocess.Popen[str]", code: int = 0) -> str:
        printed = process.communicate()[1]
        assert process.returncode == code, printed
        assert "Traceback" not in printed
        return printed

    def started(
        self, pieces: int, *sources: Path, further: int = FURTHER, start_new_session: bool = False
    ) -> "subprocess.Popen[str]":
        """One that has so many pieces, and does not end."""
        process = self.start(*sources, most=pieces + further, start_new_session=start_new_session)
        wait_until(lambda: self.pieces() >= pieces or process.poll() is not None)
        assert process.poll() is None
        return process

    def go(self) -> None:
        """Let one that was started go on to its end."""
        (self.folder / "go").touch()

    def pieces(self) -> int:
        return len(list(self.scratch.glob("*/*.json")))


def kill(process: "subprocess.Popen[str]") -> None:
    """SIGKILL the parent alone; its workers must end by themselves."""
    workers = children(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(alive, workers)))
