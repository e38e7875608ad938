"""Corpora with canaries in place, so that whatever rewrites a corpus sees them, and runs that use these canaries.

planted/roster.parquet     a row per canary (`flsim.canaries.roster`)
planted/overlay.i64/.u16   records that are canaries, counted in the corpus' order, and which
planted/planting.json      settings of the canaries, seed, number of these records
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.files import from_json, refuse_existing, write_json
from flsim.canaries.planting import Overlay, Planting, draw_canaries, plant
from flsim.canaries.population import Population, one_line
from flsim.canaries.roster import read_canaries, read_counts, write_roster
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus
from flsim.data.rewriting import rewrite_corpus
from flsim.data.vocabulary import Vocabulary

FOLDER = "planted"


@dataclass(frozen=True)
class Planted:
    """What is planted in a corpus.

    Attributes:
        planting: the canaries, and which records of the train split they are.
        hparams: how they were drawn.
        seed: of the drawing.
    """

    planting: Planting
    hparams: CanaryHParams
    seed: int

    @property
    def copies(self) -> int:
        return len(self.planting.overlay.records)

    @property
    def present(self) -> int:
        """How many canaries have a copy."""
        return int(np.count_nonzero(self.planting.insertions))

    def select(self, kept: NDArray[np.bool_], user_offsets: NDArray[np.int64]) -> "Planted":
        """What is left of it where only some records are kept; see `Planting.select`."""
        return replace(self, planting=self.planting.select(kept, user_offsets))

    def write(self, corpus: Path, vocabulary: Vocabulary) -> None:
        """Write it into the folder of a corpus that is being made."""
        folder = corpus / FOLDER
        folder.mkdir()
        write_roster(folder, self.planting, vocabulary)
        self.planting.overlay.write(folder)
        about = {"canaries": _listed(self.hparams), "seed": self.seed, "copies": self.copies}
        write_json(folder / "planting.json", about)

    @classmethod
    def read(cls, corpus: Corpus) -> "Planted | None":
        """What is planted in a corpus; None where nothing is.

        Raises:
            InputError: its files are damaged.
        """
        folder = corpus.path / FOLDER
        if f"{FOLDER}/planting.json" not in corpus.manifest["files"]:
            return None
        try:
            about = from_json((folder / "planting.json").read_text(encoding="utf-8"))
            canaries, overlay = read_canaries(folder), Overlay.read(folder, about["copies"])
            if not overlay.is_of(corpus.split("train").records, canaries):
                raise ValueError("planted records or canaries that there are not")
            if any(canary.first_round is not None or canary.last_round is not None for canary in canaries):
                raise ValueError("canaries of some rounds only, and a corpus is the same in all rounds")
            planting = Planting(canaries, overlay, **read_counts(folder))
            drawn: dict[str, Any] = {
                name: tuple(of) if isinstance(of, list) else of for name, of in dict(about["canaries"]).items()
            }
            return cls(planting, CanaryHParams(**drawn), about["seed"])
        except (OSError, KeyError, TypeError, ValueError, OverflowError, pa.ArrowException) as error:
            raise InputError(
                f"{folder}: what was planted cannot be read ({one_line(error)}); plant the canaries again"
            ) from error


def plant_corpus(corpus: Corpus, out: Path, hparams: CanaryHParams, seed: int) -> Corpus:
    """Write the corpus with canaries in place: exactly what a run over it with that seed would train on.

    Raises:
        InputError: `out` exists; the corpus has no train records, or canaries already; canaries do not suit it.
    """
    refuse_existing(out)
    if Planted.read(corpus):
        raise InputError(f"{corpus.path}: has canaries already; plant in the corpus that it came from")
    train = corpus.split("train")
    if not train.records:
        raise InputError(f"{corpus.path}: has no train records to plant canaries in; import a larger one")
    planted = Planted(plant(train, draw_canaries(corpus, hparams, seed), seed), hparams, seed)
    canaries, overlay = planted.planting.canaries, planted.planting.overlay
    return rewrite_corpus(
        corpus,
        out,
        {"step": "plant", "canaries": _listed(hparams), "seed": seed},
        source=Population.of(train, canaries, overlay),
        notes=[f"planted: {planted.copies:,} copies of {planted.present:,} canaries, of {len(canaries):,} drawn"],
        beside=lambda folder: planted.write(folder, corpus.vocabulary),
    )


def settled(corpus: Corpus, hparams: CanaryHParams) -> CanaryHParams:
    """The canaries of a run over the corpus: those that are planted in it, else those asked for.

    Raises:
        InputError: others are planted in it than are asked for, and these are not the defaults.
    """
    planted = Planted.read(corpus)
    if planted is None or hparams == planted.hparams:
        return hparams
    if hparams != CanaryHParams():
        ours, theirs = asdict(hparams), asdict(planted.hparams)
        name = next(field.name for field in fields(hparams) if ours[field.name] != theirs[field.name])
        raise InputError(
            f"canaries.{name} is {_shown(ours[name])}, but {corpus.path} has canaries planted with "
            f"{_shown(theirs[name])}; remove [canaries] from the configuration, or plant others in the corpus "
            f"that it came from"
        )
    return planted.hparams


def planting_of(corpus: Corpus, hparams: CanaryHParams, seed: int) -> Planting:
    """What is planted in the corpus, whatever the seed; else new canaries.

    Raises:
        InputError: see `draw_canaries`.
    """
    planted = Planted.read(corpus)
    return planted.planting if planted else plant(corpus.split("train"), draw_canaries(corpus, hparams, seed), seed)


def _listed(hparams: CanaryHParams) -> dict[str, Any]:
    """For files: without what is empty, so that what is planted as ever has the digest that it ever had."""
    return {name: value for name, value in asdict(hparams).items() if value != ()}


def _shown(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
