"""The users that training sees: those of the corpus with canaries planted in them, or their IID twin.

A population on disk is a small folder beside the corpus it overlays:

    roster.parquet     a row per canary: what it says, planned and actual sharers and insertions
    overlay.i64/.u16   replaced records and their canaries
    twin.i64           IID only: the corpus' records in their new order
    twin_users.i64     IID only: where each synthetic user starts in twin.i64, and its end
    population.json    world, digest of the corpus, counts
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flsim.canaries.planting import Overlay, Planting
from flsim.canaries.spec import Canary
from flsim.data.corpus import Corpus, Split, memory_map
from flsim.data.records import Records
from flsim.data.vocabulary import Layout, Vocabulary
from flsim.errors import InputError
from flsim.files import write_json
from flsim.rng import stream

World = Literal["iid", "non-iid"]


@dataclass(frozen=True)
class Twin:
    """An IID twin: all records in random order, dealt to as many synthetic users as there are real ones.

    Attributes:
        order: int64 [records], a permutation.
        user_offsets: int64 [users + 1], where each synthetic user starts in `order`.
    """

    order: NDArray[np.int64]
    user_offsets: NDArray[np.int64]


@dataclass(frozen=True)
class Population:
    """Training users of one world; satisfies `flsim.data.records.Users`."""

    split: Split
    phrases: tuple[NDArray[np.uint16], ...]
    overlay: Overlay
    twin: Twin | None = None

    @property
    def layout(self) -> Layout:
        return self.split.layout

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, user: int) -> Records:
        return self.gather(self.record_indices(user))

    def record_indices(self, user: int) -> NDArray[np.int64]:
        """Which records of the corpus the user holds, in its order."""
        if self.twin is None:
            return np.arange(self.split.user_offsets[user], self.split.user_offsets[user + 1])
        return np.asarray(self.twin.order[self.twin.user_offsets[user] : self.twin.user_offsets[user + 1]])

    def gather(self, records: NDArray[np.int64]) -> Records:
        """The given records of the corpus, int64 [n], with canaries in place."""
        starts, ends = self.split.record_offsets[records], self.split.record_offsets[records + 1]
        canaries = self.overlay.canary_of(records)
        pieces = [
            self.split.tokens[start:end] if canary < 0 else self.phrases[canary]
            for start, end, canary in zip(starts, ends, canaries, strict=True)
        ]
        offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        return Records(np.concatenate([np.empty(0, np.uint16), *pieces]), offsets)


def make_twin(split: Split, planting: Planting, seed: int) -> Twin:
    """Shuffle all planted records and deal them in sequence to synthetic users of about equal numbers of words.

    Thakkar et al. (2020), section 4.1: shuffled after planting, users filled in sequence. There are as many synthetic
    users as real ones, each of the mean real size, so that both worlds have the same cohorts and epochs and no record
    is left over: the twin is a permutation.
    """
    lengths = np.diff(split.record_offsets)
    phrase_lengths = np.array([len(canary.tokens) for canary in planting.canaries])
    lengths[planting.overlay.records] = phrase_lengths[planting.overlay.canaries]
    order = stream(seed, "iid-twin").permutation(split.records)
    words = np.cumsum(lengths[order])
    share = np.arange(1, len(split)) * (words[-1] / len(split))
    inner = np.searchsorted(words, share, side="left") + 1
    return Twin(order, np.concatenate([[0], inner, [split.records]]))


def write_population(folder: Path, corpus: Corpus, planting: Planting, world: World, seed: int) -> None:
    """Write planting, roster and, for the IID world, the twin into an existing folder."""
    roster(planting, corpus.vocabulary).to_parquet(folder / "roster.parquet", index=False)
    planting.overlay.records.astype("<i8").tofile(folder / "overlay.i64")
    planting.overlay.canaries.astype("<u2").tofile(folder / "overlay.u16")
    if world == "iid":
        twin = make_twin(corpus.split("train"), planting, seed)
        twin.order.astype("<i8").tofile(folder / "twin.i64")
        twin.user_offsets.astype("<i8").tofile(folder / "twin_users.i64")
    collisions = int(planting.planned_insertions.sum() - planting.insertions.sum())
    write_json(
        folder / "population.json",
        {
            "world": world,
            "corpus": corpus.digest,
            "collisions": collisions,
            "insertions": len(planting.overlay.records),
        },
    )


def open_population(folder: Path, corpus: Corpus) -> tuple[Population, tuple[Canary, ...]]:
    """A population and its canaries, from the folder that `write_population` filled.

    Raises:
        InputError: the folder is damaged or belongs to another corpus, or the corpus changed since.
    """
    try:
        about = json.loads((folder / "population.json").read_text(encoding="utf-8"))
        if about["corpus"] != corpus.digest:
            raise InputError(
                f"{corpus.path}: changed since canaries were planted in it ({folder}); restore it or start a new run"
            )
        canaries = read_canaries(folder)
        overlay = Overlay(memory_map(folder / "overlay.i64", "<i8"), memory_map(folder / "overlay.u16", "<u2"))
        twin = None
        if about["world"] == "iid":
            twin = Twin(memory_map(folder / "twin.i64", "<i8"), memory_map(folder / "twin_users.i64", "<i8"))
    except (OSError, KeyError, json.JSONDecodeError, pa.ArrowException) as error:
        raise InputError(
            f"{folder}: what was planted cannot be read ({error}); restore it or start a new run"
        ) from error
    phrases = tuple(np.array(canary.tokens, np.uint16) for canary in canaries)
    return Population(corpus.split("train"), phrases, overlay, twin), canaries


def roster(planting: Planting, vocabulary: Vocabulary) -> pd.DataFrame:
    """A row per canary: id, phrase, configuration, planned and actual sharers and insertions."""
    return pd.DataFrame(
        {
            "canary": [canary.id for canary in planting.canaries],
            "tokens": [list(canary.tokens) for canary in planting.canaries],
            "words": [vocabulary.decode(canary.tokens) for canary in planting.canaries],
            "p_u": [canary.p_u for canary in planting.canaries],
            "p_e": [canary.p_e for canary in planting.canaries],
            "planned_sharers": planting.planned_sharers,
            "sharers": planting.sharers,
            "planned_insertions": planting.planned_insertions,
            "insertions": planting.insertions,
        }
    )


def read_canaries(folder: Path) -> tuple[Canary, ...]:
    """The canaries of a roster."""
    rows = pq.read_table(folder / "roster.parquet", columns=["canary", "tokens", "p_u", "p_e"]).to_pylist()
    return tuple(Canary(row["canary"], tuple(row["tokens"]), row["p_u"], row["p_e"]) for row in rows)
