"""The population that is trained on: users of the corpus with planted canaries, or the IID partition.

A population on disk is a small folder in addition to the corpus:

    roster.parquet     a row per canary (`SCHEMA`)
    overlay.i64/.u16   replaced records, counted in the population's own order, and their canaries
    twin.u32           IID only: the corpus' records in their new order (twin.i64 if there are 2^32 or more)
    twin_users.i64     IID only: start of each synthetic user in that order, and the end of the last one
    kept.u32           only of a run that excludes records (`flsim.data.corpus`): the others, as positions in the
                       corpus, which everything above counts (kept.i64 if there are 2^32 or more in the corpus)
    population.json    partition, digest of the corpus, counts, digests of the files above
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError, in_one_line
from flsim.base.files import file_digest, from_json, inside, naming, refuse_existing, refuse_missing_folder, write_json
from flsim.base.parquet import read_parquet
from flsim.base.rng import stream
from flsim.base.settings import text_of
from flsim.canaries.planting import Overlay, Planting, drawn_and_planted, flat_file
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import Canary, CanaryHParams
from flsim.data.corpus import Corpus, PartialSplit, Split, position_type, record_words, rewrite_corpus
from flsim.data.records import NOBODY, ExtraUsers, Layout, Records, Tokens, Vocabulary, windows

# The roster of a population, roster.parquet: a row per canary, in the order in which an overlay numbers them.
#
# The columns of `LATER` are only in rosters that need them. Without them all canaries are planted in every round.

FILE = "roster.parquet"
COUNTS = ("planned_sharers", "sharers", "planned_insertions", "insertions")  # of `Planting`
LATER = ("is_planted", "coin", "first_round", "last_round", "pseudo_users", "template", "is_natural")  # of `Canary`
PANDAS = {pa.bool_(): "boolean", pa.int64(): "Int64", pa.string(): "string"}
SCHEMA = pa.schema(
    [
        pa.field("canary", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("words", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),  # split at spaces
        ("p_u", pa.float64()),  # missing for a number of copies
        ("p_e", pa.float64()),
        *(pa.field(name, pa.int64(), nullable=False) for name in COUNTS),
        pa.field("is_planted", pa.bool_(), nullable=False),
        ("coin", pa.bool_()),
        ("first_round", pa.int64()),
        ("last_round", pa.int64()),
        ("pseudo_users", pa.int64()),
        ("template", pa.string()),
        pa.field("is_natural", pa.bool_(), nullable=False),
    ]
)
OLDER_LACK = ("words", *COUNTS)  # columns that the oldest rosters do not have


def roster_of(planting: Planting, vocabulary: Vocabulary) -> pd.DataFrame:
    """Return the roster of planted canaries, with the columns of `LATER` that are needed."""
    canaries = planting.canaries
    columns = {
        "canary": [canary.id for canary in canaries],
        "tokens": [list(canary.tokens) for canary in canaries],
        "words": [vocabulary.text(canary.tokens).split(" ") for canary in canaries],
        "p_u": [canary.p_u for canary in canaries],
        "p_e": [canary.p_e for canary in canaries],
        **{name: getattr(planting, name) for name in COUNTS},
    }
    later = {name: [getattr(canary, name) for canary in canaries] for name in LATER}
    later["template"] = [canary.template and str(canary.template) for canary in canaries]
    used = {name: values for name, values in later.items() if any(value != getattr(Canary, name) for value in values)}
    if not canaries:  # pandas cannot infer the types of empty columns
        return cast(pd.DataFrame, _empty(columns).to_pandas())
    return pd.DataFrame(columns | used).astype({name: PANDAS[SCHEMA.field(name).type] for name in used})


def write_roster(folder: Path, planting: Planting, vocabulary: Vocabulary) -> None:
    roster = roster_of(planting, vocabulary)
    if roster.empty:
        pq.write_table(_empty(roster.columns), folder / FILE)
    else:
        roster.to_parquet(folder / FILE, index=False)


def _empty(columns: Iterable[str]) -> pa.Table:
    return pa.schema([SCHEMA.field(name) for name in columns]).empty_table()


def read_canaries(folder: Path, vocabulary: Vocabulary) -> tuple[Canary, ...]:
    """Return the canaries of a folder's roster; without probabilities they have the planned number of copies."""
    names = ["canary", "tokens", "p_u", "p_e", "planned_insertions"]
    with pq.ParquetFile(folder / FILE) as file:
        names += [name for name in LATER if name in file.schema_arrow.names]
        table = file.read(columns=names)
    schema = pa.schema([SCHEMA.field(name) for name in names])
    canaries, templates = [], cache(lambda text: Secrets.from_template(text, vocabulary))
    for row in table.select(names).cast(schema).to_pylist():
        p_u, p_e, copies = row["p_u"], row["p_e"], None
        if p_u is None:
            p_u, p_e, copies = math.nan, math.nan, row["planned_insertions"]
        later = {name: row[name] for name in names if name in LATER}
        if later.get("template") is not None:
            later["template"] = template = templates(later["template"])
            if not template.is_filling(row["tokens"]):
                raise ValueError(f"canary {row['canary']} does not fill its template")
        canaries.append(Canary(row["canary"], tuple(row["tokens"]), p_u, p_e, copies, **later))
    return tuple(canaries)


def read_counts(folder: Path) -> dict[str, NDArray[np.int64]]:
    """Return int64 [canaries] for each of `COUNTS` in a folder's roster; raise the errors of `read_canaries`."""
    counts = pq.read_table(folder / FILE, columns=list(COUNTS)).to_pydict()
    return {name: np.array(counts[name], np.int64) for name in COUNTS}


def is_drawn(roster: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each canary was planted: at least one record was drawn for it, and it is not a control.

    A canary whose copies a defence removed later counts as planted; otherwise, a share would hide the effect. In the
    oldest rosters, which do not store the number of drawn records, all canaries count as planted.
    """
    is_planted = pd.Series(data=True, index=roster.index)
    if "is_planted" in roster:
        is_planted &= roster["is_planted"].astype(bool)
    if "planned_insertions" in roster and roster["planned_insertions"].notna().all():
        is_planted &= roster["planned_insertions"] > 0
    return is_planted


def read_roster(path: Path) -> pd.DataFrame:
    """Return a roster, checked completely, with the columns of `SCHEMA` that the file has, and ``is_planted``."""
    if not path.is_file():
        raise InputError(
            f"{path}: no such file, so the canaries of this run are unknown; restore the file, or exclude the run"
        )
    roster = read_parquet(path, SCHEMA, (*OLDER_LACK, *LATER))
    if roster["canary"].duplicated().any() or not (roster["canary"].str.len() > 0).all():
        raise InputError(f"{path}: ids of canaries repeat; restore the file")
    if not all(((roster[name] > 0) & (roster[name] <= 1) | roster[name].isna()).all() for name in ("p_u", "p_e")):
        raise InputError(f"{path}: p_u and p_e must be probabilities above 0; restore the file")
    return roster if "is_planted" in roster else roster.assign(is_planted=True)


# The IID partition (twin): synthetic users of the same sizes with the same records in random order.


@dataclass(frozen=True)
class Twin:
    """An IID partition: a permutation of all records, dealt to synthetic users with these offsets [users + 1]."""

    order: NDArray[np.integer[Any]]
    user_offsets: NDArray[np.int64]


def make_twin(split: Split, planting: Planting, seed: int) -> tuple[Twin, Overlay]:
    """Shuffle all planted records and deal them in sequence to synthetic users with as many words as the real users.

    Thakkar et al. (2020), section 4.1. Each synthetic user gets as many words as the real user with the same number, up
    to one record. It needs 5 bytes of memory per record, or 6 if records have more than 255 words. The overlay is
    returned in the order of the twin.
    """
    # The paper fills users of about 2,000 words, the size of its real users. With a fixed size, the number of users
    # would change when canaries shorten records, and a remainder would be dropped. Runs with older twins, with equal
    # shares, continue with the twin in their folder.
    longest = max([split.layout.record_words, *(len(canary.tokens) for canary in planting.canaries)])
    lengths = np.empty(split.records, np.min_scalar_type(longest))
    for start, words in record_words(split):
        lengths[start : start + len(words)] = words
    overlay = planting.overlay
    phrase_lengths = np.array([len(canary.tokens) for canary in planting.canaries])
    lengths[overlay.records] = phrase_lengths[overlay.canaries]

    real = np.asarray(split.user_offsets[1:-1])
    until = np.zeros(len(real), np.int64)  # words of each real user and all previous users
    for start, words in _words_so_far(piece for _, piece in windows(lengths)):
        ended = np.flatnonzero((start <= real) & (real < start + len(words)))
        until[ended] = words[real[ended] - start]

    order = np.arange(split.records, dtype=position_type(split.records))
    stream(seed, "iid-twin").shuffle(order)
    synthetic = np.zeros(len(real), np.int64)
    for start, words in _words_so_far(lengths[piece] for _, piece in windows(order)):
        ended = np.flatnonzero((words[0] < until) & (until <= words[-1]))
        synthetic[ended] = start + words.searchsorted(until[ended])
    return Twin(order, np.concatenate([[0], synthetic, [split.records]])), _reordered(overlay, order)


def _words_so_far(pieces: Iterable[NDArray[Any]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the start of each piece of record lengths, with the numbers of words before and after each record."""
    start = words = 0
    for piece in pieces:
        so_far = np.full(len(piece) + 1, words, np.int64)
        so_far[1:] += np.cumsum(piece, dtype=np.int64)
        yield start, so_far
        start, words = start + len(piece), int(so_far[-1])


def _reordered(overlay: Overlay, order: NDArray[np.integer[Any]]) -> Overlay:
    replaced = np.zeros(len(order), bool)
    replaced[overlay.records] = True
    places = [start + np.flatnonzero(replaced[piece]) for start, piece in windows(order)]
    at = np.concatenate([np.empty(0, np.int64), *places])
    return Overlay(at, overlay.canaries[np.searchsorted(overlay.records, order[at])])


# The population, in memory and on disk.

Partition = Literal["iid", "non-iid"]
ABOUT = "population.json"
NEVER = np.iinfo(np.int64).max  # last round of a window that does not end


@dataclass(frozen=True)
class Population:
    """The training users of one partition; a `flsim.data.records.UsersByRound` and `RecordsByRound`."""

    split: Split
    phrases: tuple[Tokens, ...]  # the words of each canary, of the layout's token type
    overlay: Overlay  # the records that canaries replace, as indices in the order of the population
    twin: Twin | None = None  # the order and users of the IID partition; None for those of the corpus
    # int64 [canaries, 2], the first and the last round in which each canary is planted, from 1; None if all are
    # planted in every round
    windows: Ints | None = None
    extra: ExtraUsers = NOBODY  # pseudo-users, who inject a canary each in one round
    # int64 [records of pseudo-users], the canary of each of their records
    injected: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def with_canaries(
        cls, split: Split, canaries: Sequence[Canary], overlay: Overlay, twin: Twin | None = None
    ) -> "Population":
        """Return the users of a split, or of its IID twin, with these planted canaries."""
        phrases = tuple(np.array(canary.tokens, split.layout.token_type) for canary in canaries)
        ends = [NEVER if canary.last_round is None else canary.last_round for canary in canaries]
        windows = [(canary.first_round or 1, end) for canary, end in zip(canaries, ends, strict=True)]
        bounds = np.array(windows) if set(windows) - {(1, NEVER)} else None
        return cls(split, phrases, overlay, twin, bounds, *_pseudo_users(canaries))

    def at(self, round_: int) -> "Population":
        """Return the users of a round, from 0, with the canaries planted in it; equal rounds share an object."""
        if self.windows is None or not len(self.overlay.records):
            return self
        is_active = self.is_planted_in(np.arange(len(self.windows)), round_ + 1)
        if (key := is_active.tobytes()) not in self._by_active:
            active = is_active[self.overlay.canaries]
            overlay = Overlay(self.overlay.records[active], self.overlay.canaries[active])
            self._by_active[key] = replace(self, overlay=overlay, windows=None)
        return self._by_active[key]

    @cached_property
    def _by_active(self) -> dict[bytes, "Population"]:
        return {}

    def is_planted_in(self, canaries: NDArray[np.integer[Any]], rounds: Ints | int) -> Flags:
        """Return whether canaries [n] are planted in rounds, from 1, [n] or one for all: bool [n]."""
        if self.windows is None:
            return np.ones(len(canaries), bool)
        first, last = self.windows[canaries].T
        return np.asarray((first <= rounds) & (rounds <= last))

    @property
    def layout(self) -> Layout:
        return self.split.layout

    @property
    def user_offsets(self) -> Ints:
        """Return each user's first record in the order of the population, and the end, int64 [users + 1]."""
        return (self.twin or self.split).user_offsets

    def __len__(self) -> int:
        return len(self.split)

    def name(self, user: int) -> str:
        """Return the corpus' name of a user, or a name that marks a synthetic or injected user."""
        if user >= len(self):
            return "injected"
        return self.split.names[user] if self.twin is None else "of the IID twin"

    def copies_beyond(self, cap: int) -> tuple[int, float]:
        """Return the copies in users of more than `cap` records, and the expected number in draws of `cap` records."""
        offsets = self.user_offsets
        holders = offsets.searchsorted(self.overlay.records, side="right") - 1
        sizes = offsets[holders + 1] - offsets[holders]
        beyond = sizes[sizes > cap]
        return len(beyond), float((cap / beyond).sum())

    def __getitem__(self, user: int) -> Records:
        if user >= len(self):
            return self.records_at(self.records + self.extra.records_of(np.array([user - len(self)])))
        first, last = self.user_offsets[user : user + 2].tolist()
        records = self.split[user] if self.twin is None else self.split.records_at(self.twin.order[first:last])
        begin, end = self.overlay.records.searchsorted(np.array((first, last)))
        if begin == end:
            return records
        return self._planted(records, self.overlay.records[begin:end] - first, self.overlay.canaries[begin:end])

    @property
    def records(self) -> int:
        return self.split.records

    def records_at(self, positions: NDArray[np.integer[Any]]) -> Records:
        """Return the records at positions [n] in the order of the population; those of pseudo-users follow."""
        if (is_extra := positions >= self.records).any():
            stand_ins, extra = self.records_at(np.where(is_extra, 0, positions)), positions[is_extra] - self.records
            return self._planted(stand_ins, np.flatnonzero(is_extra), self.injected[extra])
        records = self.split.records_at(positions if self.twin is None else self.twin.order[positions])
        planted = self.overlay.records.searchsorted(positions)
        nearest = np.append(self.overlay.records, -1)[planted]
        places = np.flatnonzero(nearest == positions)
        return self._planted(records, places, self.overlay.canaries[planted[places]]) if len(places) else records

    def _planted(self, records: Records, places: Ints, canaries: NDArray[np.integer[Any]]) -> Records:
        phrases = [self.phrases[canary] for canary in canaries]
        is_from_corpus = np.ones(len(records), bool)
        is_from_corpus[places] = False
        before = np.diff(records.offsets)
        lengths = before.copy()
        lengths[places] = [len(phrase) for phrase in phrases]
        from_corpus = np.repeat(is_from_corpus, lengths)
        tokens = np.empty(len(from_corpus), records.tokens.dtype)
        tokens[from_corpus] = records.tokens[np.repeat(is_from_corpus, before)]
        tokens[~from_corpus] = np.concatenate(phrases)
        prompts = records.prompts
        if prompts is not None:  # a canary is an answer to an empty prompt
            prompts = np.where(is_from_corpus, prompts, 0)
        return Records(tokens, np.concatenate([[0], np.cumsum(lengths)]), prompts)


def _pseudo_users(canaries: Sequence[Canary]) -> tuple[ExtraUsers, Ints]:
    """Return the pseudo-users of canaries, never taking part in arm "out", and the canary of each of their records."""
    rounds, sizes, injected = list[int](), list[int](), list[int]()
    for index, canary in enumerate(canaries):
        users = canary.pseudo_users or 0
        if users and canary.is_planted:
            first, last = canary.first_round or 1, canary.last_round
            rounds += [first - 1 if last is None or first <= last else -1] * users
            sizes += [(canary.copies or 0) // users] * users
            injected += [index] * sum(sizes[-users:])
    extra = ExtraUsers(np.array(rounds, np.int64), np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]))
    return (extra, np.array(injected, np.int64)) if rounds else (NOBODY, np.empty(0, np.int64))


def write_population(
    folder: Path,
    corpus: Corpus,
    planting: Planting,
    partition: Partition,
    seed: int,
    train: Split | None = None,
    run: str | None = None,
) -> None:
    """Write planting, roster and the IID twin into a folder of the run with the identity `run`.

    `train` has the records that the run trains on.
    """
    write_roster(folder, planting, corpus.vocabulary)
    train = corpus.split("train") if train is None else train
    overlay, counts = planting.overlay, {"insertions": len(planting.overlay.records)}
    if isinstance(train, PartialSplit):
        counts["kept"] = train.records
        with naming(folder):
            train.positions.tofile(folder / _file_of("kept", train.whole.records))
    if partition == "iid":
        twin, overlay = make_twin(train, planting, seed)
        with naming(folder):
            twin.order.tofile(folder / _file_of("twin", train.records))
            twin.user_offsets.astype("<i8").tofile(folder / "twin_users.i64")
    overlay.write(folder)
    description = {"partition": partition, "corpus": corpus.digest, **counts}
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    write_json(folder / ABOUT, description | {"files": files, "run": run})


def refuse_other_run(folder: Path, identity: str | None) -> None:
    """Raise InputError if a folder has planted canaries of other settings or another seed; older ones name no run.

    Another corpus is refused when the population is opened.
    """
    planted = _about(folder).get("run") if (folder / ABOUT).is_file() else None
    if planted and identity and str(planted).partition("-")[0] != identity.partition("-")[0]:
        raise InputError(f"{folder}: these are the planted canaries of another run; restore those of this run")


def adopt_population(folder: Path, identity: str) -> None:
    """Record that a copied folder has the planted canaries of another run, too."""
    write_json(folder / ABOUT, _about(folder) | {"run": identity})


def verify_population(folder: Path) -> None:
    """Compare the digest of every file with the stored one, if any; raise InputError for a difference."""
    with _reading(folder):
        written = dict(_about(folder).get("files", {}))
    for name, stored in written.items():
        path = inside(folder, name)
        if not path.is_file() or file_digest(path) != stored:
            raise InputError(f"{path}: the file is missing, or changed after planting; restore it or start a new run")


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn errors of damaged files in the block into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (OSError, KeyError, TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise InputError(
            f"{folder}: its planted canaries cannot be read ({in_one_line(error):.200}); restore it or start a new run"
        ) from error


def _about(folder: Path) -> dict[str, Any]:
    refuse_missing_folder(folder)
    with _reading(folder):
        return dict(from_json((folder / ABOUT).read_text(encoding="utf-8")))


def _file_of(name: str, records: int) -> str:
    """Return the name of a file of positions among so many records."""
    return f"{name}.{'u32' if position_type(records) == '<u4' else 'i64'}"


def open_population(folder: Path, corpus: Corpus) -> tuple[Population, tuple[Canary, ...]]:
    """Return a population and its canaries from a folder; InputError if it or the corpus is damaged or changed."""
    with _reading(folder):
        description = _about(folder)
        if description["corpus"] != corpus.digest:
            raise InputError(
                f"{corpus.path}: the corpus changed after canaries were planted in it ({folder}); restore the "
                "corpus or start a new run"
            )
        split = corpus.split("train")
        if "kept" in description:
            path = folder / _file_of("kept", split.records)
            positions = flat_file(path, position_type(split.records), description["kept"])
            if not len(positions) or positions[-1] >= split.records:
                raise ValueError("kept records do not exist")
            split = PartialSplit.select(split, positions)
        canaries = read_canaries(folder, corpus.vocabulary)
        overlay = Overlay.read(folder, description["insertions"], split.records, canaries)
        twin = None
        if description["world" if "world" in description else "partition"] == "iid":  # older runs use another key
            path = folder / _file_of("twin", split.records)
            order = flat_file(path, position_type(split.records), split.records)
            twin = Twin(order, flat_file(folder / "twin_users.i64", "<i8", len(split) + 1))
            ends = np.concatenate([[0], twin.user_offsets, [split.records]])
            if (np.diff(ends) < 0).any() or ends[1] or ends[-2] != split.records:
                raise ValueError("users of a twin do not cover its records")
        return Population.with_canaries(split, canaries, overlay, twin), canaries


# Corpora with planted canaries: code that rewrites such a corpus sees the canaries, and runs on the corpus use them.
#
# planted/roster.parquet     a row per canary (`SCHEMA`)
# planted/overlay.i64/.u16   positions of the records that are canaries, in the corpus' order, and their canaries
# planted/planting.json      settings of the canaries, seed, number of these records

FOLDER = "planted"
# Settings that make records depend on the round.
BY_ROUND = ("windows", "arm", "injections", "injection_users", "injection_copies")


@dataclass(frozen=True)
class PlantedCorpus:
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

    def select(self, kept: NDArray[np.bool_], user_offsets: NDArray[np.int64]) -> "PlantedCorpus":
        return replace(self, planting=self.planting.select(kept, user_offsets))

    def write(self, corpus: Path, vocabulary: Vocabulary) -> None:
        folder = corpus / FOLDER
        folder.mkdir()
        write_roster(folder, self.planting, vocabulary)
        self.planting.overlay.write(folder)
        description = {"canaries": _listed(self.hparams), "seed": self.seed, "copies": self.copies}
        write_json(folder / "planting.json", description)

    @classmethod
    def read(cls, corpus: Corpus) -> "PlantedCorpus | None":
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
    if PlantedCorpus.read(corpus):
        raise InputError(f"{corpus.path}: this corpus already has canaries; use the original corpus")
    train = corpus.split("train")
    if not train.records:
        raise InputError(f"{corpus.path}: this corpus has no train records for canaries; import a larger corpus")
    planted = PlantedCorpus(drawn_and_planted(corpus, hparams, seed), hparams, seed)
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
    planted = PlantedCorpus.read(corpus)
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
    planted = PlantedCorpus.read(corpus)
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
