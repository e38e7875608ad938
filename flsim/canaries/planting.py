"""Planting of canaries: the records that each canary replaces, as an overlay on an unchanged corpus.

Thakkar et al. (2020), section 4.1, "Canary Insertion", with Poisson sampling of users and records; or a fixed number of
copies of each canary, as in Carlini et al., "The Secret Sharer" (2018), section 6.5.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError, in_one_line
from flsim.base.files import from_json, naming
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.base.settings import Natural, Probability, Whole, bounds, input_error, pydantic, settings
from flsim.canaries import spec
from flsim.canaries.secrets import templates
from flsim.data.corpus import Corpus, Split, memory_map
from flsim.data.records import Layout, Records, Vocabulary, piece, windows
from flsim.data.sentences import NGrams
from flsim.data.tokenizer import TokenVocabulary

# Canaries from a file: phrases that may be in the training data of a model, and phrases that are not.

UNREADABLE = (OSError, ValueError, TypeError, csv.Error, pa.ArrowException)  # errors of `read_table`

SPLIT = pydantic and pydantic.BeforeValidator(lambda value: value.split() if isinstance(value, str) else value)


@settings
class Listed:
    """A canary in a file: its phrase as `words` of the vocabulary or as `tokens` (ids); see `Canary`."""

    id: Annotated[str, bounds(min_length=1)]
    words: str | tuple[str, ...] | None = None
    tokens: Annotated[tuple[Whole, ...] | None, SPLIT] = None
    p_u: Probability = math.nan
    p_e: Probability = math.nan
    copies: Natural | None = None  # 0 for a control

    def __post_init__(self) -> None:
        if (self.words is None) == (self.tokens is None):
            raise InputError("this row must have words or tokens, not both")


def read_listed(path: Path, layout: Layout, vocabulary: Vocabulary | None) -> tuple[spec.Canary, ...]:
    """Return the canaries of a CSV file with a header, or of a JSON file with a list of objects, as of `Listed`.

    Words or tokens are separated by spaces, or in JSON a list. InputError for other files.
    """
    if path.suffix.lower() not in (".csv", ".json"):
        raise InputError(f"{path}: canaries must be in a .csv or .json file")
    try:
        rows = read_table(path)
    except UNREADABLE as error:
        raise InputError(f"{path}: cannot be read as {path.suffix.lower()} ({in_one_line(error):.200})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: must be a list of objects, each a canary")
    if not rows:
        raise InputError(f"{path}: the file has no canary; list at least one canary")
    canaries = tuple(_canary(f"{path}, canary {index}", row, layout, vocabulary) for index, row in enumerate(rows, 1))
    for id_, count in Counter(canary.id for canary in canaries).items():
        if count > 1:
            raise InputError(f"{path}: canary {id_} is listed twice; give each canary a different id")
    return canaries


def read_table(path: Path, columns: Sequence[str] | None = None) -> list[dict[Any, Any]]:
    """Return the rows of a file, .parquet, .csv, .json or JSON lines; of .parquet, these columns, by default all."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return list(pq.read_table(path, columns=None if columns is None else list(columns)).to_pylist())
    if suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [*csv.DictReader(file, strict=True)]
    text = path.read_text(encoding="utf-8-sig")
    if suffix == ".json":
        return from_json(text)  # type: ignore[no-any-return]
    return [from_json(line) for line in text.split("\n") if line.strip()]


def _canary(where: str, row: Mapping[Any, Any], layout: Layout, vocabulary: Vocabulary | None) -> spec.Canary:
    if None in row:
        raise InputError(f"{where}: has more fields than the header; quote a field that has a comma in it")
    given = {key: value for key, value in row.items() if value not in (None, "")}
    try:
        listed: Listed = pydantic.TypeAdapter(Listed).validate_python(given | {"id": str(row.get("id", "")).strip()})
    except pydantic.ValidationError as error:
        raise input_error(error, Listed, where) from error
    tokens = encoded(where, listed.words, vocabulary) if listed.tokens is None else listed.tokens
    refuse_special(where, tokens, layout)
    return spec.Canary(listed.id, tokens, listed.p_u, listed.p_e, listed.copies, is_planted=listed.copies != 0)


def refuse_special(where: str, tokens: tuple[int, ...], layout: Layout) -> None:
    """Raise InputError if a token is not a token of text, such as OOV; `where` names the phrase in messages."""
    text = layout.text_ids
    for token in tokens:
        if token not in text:
            raise InputError(
                f"{where}: token {token} is not the id of a word; word ids are {text.start} to {text.stop - 1}"
            )


def encoded(where: str, value: Any, vocabulary: Vocabulary | None) -> tuple[int, ...]:
    """Return the tokens of a text, or of a list of words; raise InputError if the vocabulary lacks a word."""
    if vocabulary is None:
        raise InputError(
            f"{where}: this row has words, but there is no vocabulary; give a vocabulary or a corpus, or list tokens"
        )
    if isinstance(vocabulary, TokenVocabulary):
        if not isinstance(value, str):
            raise InputError(f"{where}: words must be text, which the tokenizer of the corpus cuts")
        return tuple(vocabulary.encode_text(value))
    words = vocabulary.split(value) if isinstance(value, str) else list(value)
    for word in words:
        if word not in vocabulary.ids:
            raise InputError(f'{where}: "{word}" is not in the vocabulary')
    return tuple(vocabulary.encode(words))


class Holders(Protocol):
    """Users and their numbers of records, with any content; `user_offsets` are int64 [users + 1]."""

    @property
    def records(self) -> int: ...
    @property
    def user_offsets(self) -> Ints: ...
    def __len__(self) -> int: ...


class PhraseSource(Protocol):
    """The words of phrases, and splits of text in which no phrase may occur: a corpus, or only words."""

    @property
    def layout(self) -> Layout: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def splits(self) -> Sequence[str]: ...
    @property
    def path(self) -> Path: ...
    def split(self, name: str) -> Split: ...


# Phrases of canaries: random words, the first words of records of held-out users, or fillings of a template.

HELDOUT = "heldout"  # the split of held-out users, and the value of `source` for canaries from it
TRIED = 100  # number of records that are searched for text inside the vocabulary
Draw = Callable[[int, int], tuple[int, ...]]  # a phrase by the canary's index and the attempt


def natural_phrases(corpus: PhraseSource, length: int, seed: int) -> Draw:
    """Return a function that draws the first words, all in the vocabulary, of held-out records after their prompts."""
    heldout, layout = corpus.split(HELDOUT), corpus.layout
    offsets, text = np.asarray(heldout.record_offsets), layout.text_ids
    starts = offsets[:-1] + (0 if heldout.prompts is None else heldout.prompts)
    starts = starts[offsets[1:] - starts >= length]
    none = InputError(
        f"{corpus.path}: held-out users have too few records that begin with {length} words of the vocabulary; set a "
        f'smaller canaries.length, or canaries.source = "words"'
    )
    if not len(starts):
        raise none

    def draw(index: int, attempt: int) -> tuple[int, ...]:
        for chosen in stream(seed, "natural canary", index, attempt).integers(len(starts), size=TRIED).tolist():
            phrase = tuple(heldout.tokens[starts[chosen] : starts[chosen] + length].tolist())
            if text.start <= min(phrase) and max(phrase) < text.stop:
                return phrase
        raise none

    return draw


def listed_phrases(corpus: PhraseSource, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the phrases of the settings as tokens, which may not occur in the corpus, or be the same or too long."""
    phrases = dict[tuple[int, ...], str]()
    for text in texts:
        where = f'canaries.phrases: "{text}"'
        phrase = encoded(where, text, corpus.vocabulary)
        refuse_special(where, phrase, corpus.layout)
        refuse_too_long(len(phrase), corpus.layout, "canaries.phrases")
        if not phrase or phrase in phrases:
            raise InputError(f"{where} {'is the same as another phrase' if phrase else 'is empty'}; write another text")
        phrases[phrase] = text
    for name in corpus.splits:
        for phrase in occurring(corpus.split(name), phrases):
            raise InputError(f'canaries.phrases: "{phrases[phrase]}" occurs in {name}; write another text')
    return list(phrases)


# The planting: the records that canaries replace, in a fixed number or by Poisson sampling.

REDRAWS = 100
AT_ONCE = 2**20  # words that are searched at once


@dataclass(frozen=True)
class Overlay:
    """The replaced records of a population, as ascending indices [n], each with the index of its canary [n]."""

    records: Ints
    canaries: NDArray[np.uint16]

    def write(self, folder: Path) -> None:
        with naming(folder):
            self.records.astype("<i8").tofile(folder / "overlay.i64")
            self.canaries.astype("<u2").tofile(folder / "overlay.u16")

    @classmethod
    def read(cls, folder: Path, count: int, records: int, canaries: Sequence[spec.Canary]) -> "Overlay":
        """Return `count` replaced records of `records`, as `write` left them; OSError or ValueError if files are wrong.

        Records ascend, and each has one of the canaries that are planted.
        """
        overlay = cls(flat_file(folder / "overlay.i64", "<i8", count), flat_file(folder / "overlay.u16", "<u2", count))
        planted = [index for index, canary in enumerate(canaries) if canary.is_planted]
        ends = np.concatenate([[-1], overlay.records, [records]])
        if (np.diff(ends) <= 0).any() or not np.isin(overlay.canaries, planted).all():
            raise ValueError("planted records or canaries do not exist")
        return overlay

    def select(self, kept: Flags) -> "Overlay":
        """Return the overlay of the remaining records, by `kept` [records], with indices among them."""
        remaining = kept[self.records]
        gone = np.flatnonzero(~kept)
        records = self.records[remaining]
        return Overlay(records - np.searchsorted(gone, records), self.canaries[remaining])


@dataclass(frozen=True)
class Planting:
    """An overlay, its canaries, and the numbers of their sharers and insertions, int64 [canaries] each."""

    canaries: tuple[spec.Canary, ...]
    overlay: Overlay
    # users drawn with probability p_u; for canaries with a number of copies, the users that hold copies
    planned_sharers: Ints
    sharers: Ints  # users that hold at least one copy
    # records drawn with probability p_e among the records of sharers, or the number of copies
    planned_insertions: Ints
    # replaced records: the planned records, without records that another canary got or that were later dropped
    # from the corpus
    insertions: Ints

    def say_absent(self) -> None:
        """Print a warning if at least half of the canaries to plant have no copy."""
        to_plant = np.array([canary.is_planted for canary in self.canaries], bool)
        absent, count = int((self.insertions[to_plant] == 0).sum()), int(to_plant.sum())
        if absent and 2 * absent >= count:
            say(
                f"{absent:,} of {count:,} canaries have no copy in the training records; raise canaries.p_u and "
                "canaries.p_e, or set canaries.insertions",
                failure="canaries without copies",
            )

    def select(self, kept: Flags, user_offsets: Ints) -> "Planting":
        """Return the planting in the remaining records, by `kept` [records]: only actual counts are recomputed."""
        overlay = self.overlay.select(kept)
        kept_offsets = user_offsets - np.searchsorted(np.flatnonzero(~kept), user_offsets)
        sharers, insertions = counts_of(overlay, kept_offsets, len(self.canaries))
        return replace(self, overlay=overlay, sharers=sharers, insertions=insertions)


def say_crowded(share: float) -> None:
    """Print a warning if canaries replace more than half of all records, by their share."""
    if sentence := spec.crowding(share):
        say(f"warning: {sentence}")


def flat_file(path: Path, dtype: str, count: int) -> NDArray[Any]:
    """Return a memory-mapped file with `count` values; raise ValueError if the number differs."""
    values = memory_map(path, dtype)
    if len(values) != count:
        raise ValueError(f"{path.name} has {len(values):,} values instead of {count:,}")
    return values


def counts_of(overlay: Overlay, user_offsets: Ints, canaries: int) -> tuple[Ints, Ints]:
    """Return the number of users that hold a copy, and the number of copies, int64 [canaries] each."""
    holders = np.searchsorted(user_offsets, overlay.records, side="right") - 1
    sharers = np.array([len(np.unique(holders[overlay.canaries == canary])) for canary in range(canaries)], np.int64)
    return sharers, np.bincount(overlay.canaries, minlength=canaries)


def draw_canaries(
    corpus: PhraseSource, hparams: spec.CanaryHParams, seed: int, rounds: int | None = None
) -> tuple[spec.Canary, ...]:
    """Draw distinct phrases that do not occur in any split of the corpus; a phrase that occurs is drawn again.

    Controls are last, and of two equal phrases the later one is drawn again, so planted canaries are the same without
    controls. `rounds` is the length of training. Raises InputError if canaries do not fit corpus and rounds.
    """
    layout = corpus.layout
    planted = spec.configurations(hparams)
    control = spec.Configuration(math.nan, math.nan, 0)
    planned = planted + [control] * hparams.controls
    secrets = templates(hparams.template, corpus.vocabulary, seed, len(planned) or 1) if hparams.template else []
    template = secrets[0] if secrets else None
    listed = listed_phrases(corpus, hparams.phrases)
    length = template.length if template else max(map(len, listed), default=hparams.length)
    setting = "canaries.template" if template else "canaries.length"
    refuse_too_long(length, layout, setting)
    bounds = {one: hparams.bounds(one, rounds) for one in planted} | {control: (None, None)}
    is_natural = hparams.is_natural
    source = "text of held-out users" if is_natural else f"vocabulary of {layout.words} words"
    too_few = InputError(
        f"found fewer than {len(planned)} different phrases of {length} words that are not in the corpus; use "
        f"a corpus with a larger {source}, or a longer {setting}"
    )
    # so that references remain, and draws without repetition end soon
    if template and 2 * len(planned) > template.space:
        raise InputError(
            f'canaries.template "{template}" has {template.space:,} fillings, but {len(planned):,} canaries need twice '
            f"this number; set longer holes, or a smaller canaries.count or canaries.controls"
        )
    if len(planned) > layout.words**length:
        raise too_few
    attempts = [0] * len(planned)

    def draw(index: int, attempt: int) -> tuple[int, ...]:
        if secrets:
            return tuple(secrets[index].draw(stream(seed, "secret", index, attempt), 1)[0].tolist())
        return natural(index, attempt) if natural else spec.draw_phrase(seed, index, attempt, length, layout)

    natural = natural_phrases(corpus, length, seed) if hparams.source == "heldout" else None
    phrases = listed or [draw(index, 0) for index in range(len(planned))]
    splits = [corpus.split(name) for name in corpus.splits if not (is_natural and name.startswith(HELDOUT))]
    splits = [] if listed else splits  # `listed_phrases` searched all splits
    known, taken = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for _ in range(REDRAWS):
        taken.update(*(occurring(split, set(phrases) - known) for split in splits))
        known.update(phrases)
        first = {phrase: i for i, phrase in reversed([*enumerate(phrases)])}
        rejected = [i for i, phrase in enumerate(phrases) if phrase in taken or first[phrase] != i]
        if not rejected:
            digits = len(str(len(planted) - 1))  # controls are last, so the ids of other canaries do not change
            coins = [spec.toss(seed, index) if hparams.coins else None for index in range(len(planted))]
            coins += [None] * hparams.controls
            return tuple(
                spec.Canary(
                    f"c{index:0{digits}d}",
                    phrase,
                    one.p_u,
                    one.p_e,
                    one.copies,
                    is_planted=index < len(planted) and coin is not False,
                    coin=coin,
                    first_round=bounds[one][0],
                    last_round=bounds[one][1],
                    pseudo_users=one.users or None,
                    template=secrets[index] if secrets else None,
                    is_natural=is_natural,
                )
                for index, (phrase, one, coin) in enumerate(zip(phrases, planned, coins, strict=True))
            )
        for i in rejected:
            attempts[i] += 1
            phrases[i] = draw(i, attempts[i])
    raise too_few


def occurring(split: Split, phrases: Collection[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return the phrases that occur within a record of the split, which is read piece by piece."""
    listed, present = list(phrases), set[int]()
    index = NGrams(Records.from_lists([list(phrase) for phrase in listed]))
    for _, offsets in windows(split.record_offsets, max(1, AT_ONCE // split.layout.record_words), overlap=1):
        tokens = piece(split.tokens, int(offsets[0]), int(offsets[-1]))
        present.update(index.find(Records(tokens, offsets - offsets[0]))[0].tolist())
    return {phrase for phrase, group in zip(listed, index.group.tolist(), strict=True) if group in present}


def drawn_and_planted(
    corpus: Corpus, hparams: spec.CanaryHParams, seed: int, train: Split | None = None, rounds: int | None = None
) -> Planting:
    """Return new canaries, planted among the training users: all of the corpus, or those of `train`."""
    train = corpus.split("train") if train is None else train
    refuse_too_many(hparams, train.records)
    return plant(train, draw_canaries(corpus, hparams, seed, rounds), seed)


def plant(split: Holders, canaries: tuple[spec.Canary, ...], seed: int) -> Planting:
    """Draw sharers and replaced records of every canary.

    Each user is a sharer of a canary with probability p_u, each record of a sharer is replaced with probability p_e,
    all independently. If several canaries claim a record, one of them, chosen uniformly, gets it. Canaries with a
    number of copies replace this number of records, drawn from all records; InputError if there are fewer.

    Controls replace no records, nor do canaries whose coin excludes them: these have the planned counts and the draws
    of others without the coin.
    """
    if any(canary.pseudo_users for canary in canaries):
        return _injected(canaries)
    has_copies = any(canary.copies for canary in canaries)
    records, owners, planned_sharers = (_drawn_copies if has_copies else _claims)(split, canaries, seed)
    planned_insertions = np.bincount(owners, minlength=len(canaries))
    priority = stream(seed, "collisions").random(len(records))
    is_planted = np.array([canary.is_planted for canary in canaries], np.bool_)[owners]
    records, owners, priority = records[is_planted], owners[is_planted], priority[is_planted]
    order = np.lexsort((priority, records))
    records, owners = records[order], owners[order]
    wins = np.diff(records, prepend=-1) != 0
    overlay = Overlay(records[wins], owners[wins].astype(np.uint16))
    sharers, insertions = counts_of(overlay, split.user_offsets, len(canaries))
    planned_sharers = sharers if planned_sharers is None else planned_sharers
    return Planting(canaries, overlay, planned_sharers, sharers, planned_insertions, insertions)


def _claims(split: Holders, canaries: tuple[spec.Canary, ...], seed: int) -> tuple[Ints, Ints, Ints]:
    """Draw the records that each canary claims; return records and their canaries [n], and numbers of sharers."""
    claims, claimants = [np.empty(0, np.int64)], [0]  # also for an empty list of canaries
    planned_sharers = []
    for index, canary in enumerate(canaries):
        sharers = np.flatnonzero(stream(seed, "sharers", index).random(len(split)) < canary.p_u)
        if not canary.is_planted and canary.coin is None:
            sharers = sharers[:0]
        for user in sharers.tolist():
            first, last = split.user_offsets[user : user + 2].tolist()
            is_claimed = stream(seed, "insertions", index, user).random(last - first) < canary.p_e
            claims.append(first + np.flatnonzero(is_claimed))
            claimants.append(index)
        planned_sharers.append(len(sharers))
    owners = np.repeat(claimants, [*map(len, claims)])
    return np.concatenate(claims), owners, np.array(planned_sharers, np.int64)


def _drawn_copies(split: Holders, canaries: tuple[spec.Canary, ...], seed: int) -> tuple[Ints, Ints, None]:
    """Draw a distinct record for each copy; every choice of records is equally likely."""
    copies = [canary.copies or 0 for canary in canaries]  # controls have no draws
    refuse_copies(sum(copies), split.records)
    records = stream(seed, "copies").choice(split.records, sum(copies), replace=False)
    return records, np.repeat(np.arange(len(canaries)), copies), None


def _injected(canaries: tuple[spec.Canary, ...]) -> Planting:
    users = np.array([canary.pseudo_users or 0 for canary in canaries], np.int64)
    copies = np.array([canary.copies or 0 for canary in canaries], np.int64)
    is_planted = np.array([canary.is_planted for canary in canaries], np.bool_)
    overlay = Overlay(np.empty(0, np.int64), np.empty(0, np.uint16))
    return Planting(canaries, overlay, users, users * is_planted, copies, copies * is_planted)


# The limits of canaries that follow from their settings and the size of the corpus, before any canary is drawn.

MOST = 2**16  # largest number of canaries; an overlay stores indices as uint16


def refuse_too_many(hparams: spec.CanaryHParams, records: int) -> None:
    """Raise InputError for more canaries than an overlay can store, or more copies than training records."""
    canaries = spec.number_of_canaries(hparams)
    if canaries > MOST:
        raise InputError(
            f"{canaries:,} canaries, but a run can have at most {MOST:,}; set a smaller canaries.count or "
            "canaries.controls"
        )
    copies = spec.expected_copies(hparams, records)
    if hparams.insertions:
        refuse_copies(round(copies), records)
    if copies > records:
        raise InputError(
            f"{canaries:,} canaries would replace about {copies:,.0f} records, and the training users have "
            f"{records:,}; set a smaller canaries.count, or smaller canaries.p_u or canaries.p_e"
        )


def refuse_copies(copies: int, records: int) -> None:
    if copies > records:
        raise InputError(
            f"{copies:,} copies of canaries do not fit into {records:,} training records; set fewer "
            f"canaries.insertions, or a smaller canaries.count"
        )


def refuse_too_long(length: int, layout: Layout, setting: str = "canaries.length") -> None:
    """Raise InputError if canaries of `length` words, see `setting`, exceed a record of the layout."""
    if length > layout.record_words:
        raise InputError(
            f"canaries of {length:,} words would be cut, because records of this corpus have at most "
            f"{layout.record_words} words; set {setting} to at most this number"
        )
