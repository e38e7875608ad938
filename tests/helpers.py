"""What several test files share."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flsim.data.corpus import Corpus

MakeCorpus = Callable[..., Corpus]


@dataclass(frozen=True)
class Experiment:
    """A corpus and a configuration that train in a second, and the command line to do it with."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "tiny.toml"

    def flsim(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the real command in its own process."""
        done = subprocess.run(
            [sys.executable, "-m", "flsim", *map(str, arguments)], cwd=self.folder, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def run(self, name: str, *overrides: str, options: Sequence[str] = ()) -> Path:
        """Train with the given overrides; the run folder."""
        settings = [part for override in overrides for part in ("--set", override)]
        self.flsim("run", self.config, "--out", name, *settings, *options)
        return self.folder / name


TINY = """
[data]
corpus = "corpus"
[canaries]
p_u = [0.2]
p_e = [0.5, 1.0]
count = 2
[model]
embedding = 8
units = 12
[training]
rounds = 4
cohort = 6
[local]
batch_size = 4
[evaluation]
every = 2
references = 200
[system]
checkpoint_every = 1
"""
