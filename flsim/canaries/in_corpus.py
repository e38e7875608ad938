"""Corpora with planted canaries: code that rewrites such a corpus sees the canaries, and runs on the corpus use them.

planted/roster.parquet     a row per canary (`flsim.canaries.population`)
planted/overlay.i64/.u16   positions of the records that are canaries, in the corpus' order, and their canaries
planted/planting.json      settings of the canaries, seed, number of these records
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flsim.base.errors import InputError, in_one_line
from flsim.base.files import from_json, refuse_existing, write_json
from flsim.base.settings import text_of
from flsim.canaries.planting import Overlay, Planting, drawn_and_planted
from flsim.canaries.population import Population, read_canaries, read_counts, write_roster
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus, Split
from flsim.data.vocabulary import Vocabulary
from flsim.data.withheld import PartialSplit, rewrite_corpus

FOLDER = "planted"
# Settings that make records depend on the round.
BY_ROUND = ("windows", "arm", "injections", "injection_users", "injection_copies")


@dataclass(frozen=True)
class Planted:
    """The canaries that are planted in a corpus, with the records of the train split that they replaced."""

    planting: Planting
    hparams: CanaryHParams
    seed: int

    @property
    def copies(self) -> int:
        return len(self.planting.overlay.records)

    @property
    def present(self) -> int:
        return int(np.count_nonzero(self.planting.insertions))

    def select(self, kept: NDArray[np.bool_], user_offsets: NDArray[np.int64]) -> "Planted":
        return replace(self, planting=self.planting.select(kept, user_offsets))

    def write(self, corpus: Path, vocabulary: Vocabulary) -> None:
        folder = corpus / FOLDER
        folder.mkdir()
        write_roster(folder, self.planting, vocabulary)
        self.planting.overlay.write(folder)
        description = {"canaries": _listed(self.hparams), "seed": self.seed, "copies": self.copies}
        write_json(folder / "planting.json", description)

    @classmethod
    def read(cls, corpus: Corpus) -> "Planted | None":
        """Return the canaries that are planted in a corpus; None if there are none, InputError if files are damaged."""
        folder = corpus.path / FOLDER
        if f"{FOLDER}/planting.json" not in corpus.manifest["files"]:
            return None
        try:
            description = from_json((folder / "planting.json").read_text(encoding="utf-8"))
            canaries = read_canaries(folder, corpus.vocabulary)
            overlay = Overlay.read(folder, description["copies"], corpus.split("train").records, canaries)
            if any(canary.first_round is not None or canary.last_round is not None for canary in canaries):
                raise ValueError("canaries of some rounds only, but a corpus is the same in all rounds")
            planting = Planting(canaries, overlay, **read_counts(folder))
            return cls(planting, CanaryHParams(**description["canaries"]), description["seed"])
        except (OSError, KeyError, TypeError, ValueError, OverflowError, pa.ArrowException) as error:
            raise InputError(
                f"{folder}: its planted canaries cannot be read ({in_one_line(error):.200}); plant the canaries again"
            ) from error


def refuse_by_round(hparams: CanaryHParams, why: str) -> None:
    for name in BY_ROUND:
        if getattr(hparams, name) != getattr(CanaryHParams, name):
            raise InputError(f"canaries.{name}: {why}")


def plant_corpus(corpus: Corpus, out: Path, hparams: CanaryHParams, seed: int) -> Corpus:
    """Write the corpus, which has no canaries, with canaries, exactly as a run with this seed would train on it."""
    refuse_existing(out)
    refuse_by_round(hparams, "a corpus is the same in all rounds; remove this setting, and set it in a run")
    if Planted.read(corpus):
        raise InputError(f"{corpus.path}: this corpus already has canaries; use the original corpus")
    train = corpus.split("train")
    if not train.records:
        raise InputError(f"{corpus.path}: this corpus has no train records for canaries; import a larger corpus")
    planted = Planted(drawn_and_planted(corpus, hparams, seed), hparams, seed)
    canaries, overlay = planted.planting.canaries, planted.planting.overlay
    return rewrite_corpus(
        corpus,
        out,
        {"step": "plant", "canaries": _listed(hparams), "seed": seed},
        source=Population.with_canaries(train, canaries, overlay),
        notes=[f"planted: {planted.copies:,} copies of {planted.present:,} canaries, of {len(canaries):,} drawn"],
        write_more=lambda folder: planted.write(folder, corpus.vocabulary),
    )


def settled(corpus: Corpus, hparams: CanaryHParams) -> CanaryHParams:
    """Return the canary settings of the corpus, if it has canaries (InputError if others are set), or of the run."""
    planted = Planted.read(corpus)
    if planted is None or hparams == planted.hparams:
        return hparams
    if hparams != CanaryHParams():
        wanted, present = asdict(hparams), asdict(planted.hparams)
        name = next(field.name for field in fields(hparams) if wanted[field.name] != present[field.name])
        raise InputError(
            f"canaries.{name} is {text_of(wanted[name])}, but {corpus.path} has canaries planted with "
            f"{text_of(present[name])}; remove [canaries] from the configuration, or plant other canaries in "
            "the original corpus"
        )
    return planted.hparams


def planting_of(
    corpus: Corpus, hparams: CanaryHParams, seed: int, train: Split | None = None, rounds: int | None = None
) -> Planting:
    """Return the canaries in the corpus, independent of the seed, which no excluded record holds, or new canaries."""
    planted = Planted.read(corpus)
    if planted and isinstance(train, PartialSplit):
        raise InputError(
            f"data.user_holdout, data.shadow and data.max_records exclude records, and {corpus.path} has canaries in "
            "some of them; use the original corpus, and plant the canaries in the run"
        )
    return planted.planting if planted else drawn_and_planted(corpus, hparams, seed, train, rounds)


def _listed(hparams: CanaryHParams) -> dict[str, Any]:
    """Return the settings for a file: the oldest four, and others that are set, so existing digests do not change."""
    always = ("p_u", "p_e", "count", "length")
    settings = asdict(hparams).items()
    return {name: value for name, value in settings if name in always or value != getattr(CanaryHParams, name)}
