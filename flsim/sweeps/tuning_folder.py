"""The folder of a search for settings, which is made once and can be continued.

tune.json       the search, so that no other one goes on in the folder
tuned.toml      the outcome, once the search has ended
configs/        the settings of each trial's runs, at the length that was trained last
corpus/         the corpus, if the tier makes one
runs/           run folders
logs/           the output of each run
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flsim.base.errors import InputError
from flsim.base.files import from_json, make_folder, new_file, write_json
from flsim.data.corpus import Corpus
from flsim.data.stores import located
from flsim.results.sweeps import RUNS
from flsim.runs.config import Config, dump
from flsim.sweeps.definition import Tier
from flsim.sweeps.folder import CORPUS, CORPUS_SEED, TUNED, SweepFolder, corpus_of, open_corpus
from flsim.sweeps.tuning import Search, TuningTier

FILE = "tune.json"


@dataclass(frozen=True)
class TuningFolder(SweepFolder):
    """A search on disk."""

    file: ClassVar[str] = FILE
    ours: ClassVar[set[str]] = {FILE, TUNED, RUNS, CORPUS, "configs", "logs"}
    what: ClassVar[str] = "tune"

    @property
    def outcome(self) -> Path:
        """Return the file of the outcome."""
        return self.path / TUNED

    def begin(self, search: Search, digest: str) -> None:
        """Make the folders and write tune.json; a folder that has one must have the same search.

        Raises:
            InputError: the folder has another search.
        """
        path = self.path / FILE
        if path.exists():
            try:
                known: Any = from_json(path.read_text(encoding="utf-8"))["digest"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}: damaged; restore it, or name another --out") from error
            if known != digest:
                raise InputError(f"{self.path}: holds another search than {search.source} is now; name another --out")
        for name in (RUNS, "configs", "logs"):
            make_folder(self.path / name)
        about = {"sweep": search.definition.title, "tier": search.tier_name, "digest": digest}
        write_json(path, about)

    def write_config(self, name: str, config: Config) -> Path:
        """Write the settings of a run, and return their file."""
        with new_file(self.config(name)) as partial:
            dump(config, partial)
        return self.config(name)


def corpus_of_search(source: Path, sweep: Path, at: TuningTier, tier: Tier, folder: Path) -> Path | str:
    """Return where the corpus of a search is, or will be made.

    Raises:
        InputError: an existing corpus is missing, or the corpus of the tier cannot be made from another seed.
    """
    if at.corpus_seed is not None and tier.corpus.synthetic is None:
        raise InputError(f"{source}: corpus_seed: the corpus of this tier is not synthetic; name a corpus in its place")
    if at.corpus is None:
        return corpus_of(tier, sweep, folder)
    path = located(at.corpus, source.parent)
    if isinstance(path, Path) and not path.exists():
        raise InputError(f"{path}: no such corpus; name another one in {source}")
    return path


def open_corpus_of_search(search: Search, folder: Path) -> Corpus:
    """Open the corpus; make it first if it is the search's own, synthetic, and does not exist."""
    seed = CORPUS_SEED if search.at.corpus_seed is None else search.at.corpus_seed
    return open_corpus(search.tier, search.corpus, folder, seed)
