"""Scale of an experiment, beside the published one: users, cohorts, epochs, and copies of canaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from flsim.canaries.spec import CanaryHParams, configurations, distinct_configurations, expected_copies
from flsim.data.corpus import Corpus, Split
from flsim.data.kept import Shadow, kept
from flsim.data.vocabulary import Layout
from flsim.results.sweeps import WORLD, SweepRun
from flsim.runs.config import Config
from flsim.sweeps.definition import Definition, Planned, Tier, TierCorpus, planned_runs


@dataclass(frozen=True)
class Users:
    """The numbers of the training users.

    Attributes:
        users: number of train users.
        records, words: their records and words.
        vocabulary: number of token ids.
    """

    users: int
    records: int
    words: int
    vocabulary: int

    @classmethod
    def in_corpus(cls, corpus: Corpus) -> "Users":
        """Return the numbers of a corpus' train users."""
        return cls.counted(corpus.split("train"))

    @classmethod
    def counted(cls, users: Split) -> "Users":
        """Return the numbers of these users."""
        return cls(len(users), users.records, users.words, users.layout.vocabulary_size)

    def split(self) -> Split:
        """Return as many users, all alike, so that a configuration can compute how long it trains; nothing can be read.

        Offsets are views of a single number, so they take no memory whatever their length.
        """
        return Split(
            Layout(self.vocabulary, 20),
            np.broadcast_to(np.uint16(0), self.words),
            np.broadcast_to(np.int64(0), self.records + 1),
            np.linspace(0, self.records, self.users + 1).astype(np.int64),
            Path(),
        )


def trained_on(config: Config, train: Split) -> Split:
    """Return the users that a run trains on, without what `data.user_holdout` and `data.shadow` leave out.

    Where records are left out the result is for counting alone: nothing can be read of it, as of `Users.split`.

    Args:
        config: settings of the run.
        train: the corpus' training users.
    """
    data = config.data
    return _left(train, data.user_holdout, data.shadow, config.seed) if data.leaves_out else train


@lru_cache(maxsize=1_024)  # every part of a plan asks again; only counts and offsets of users are kept
def _left(train: Split, user_holdout: float, shadow: Shadow | None, seed: int) -> Split:
    left = kept(train, user_holdout, shadow, seed)
    return replace(Users.counted(left).split(), user_offsets=np.asarray(left.user_offsets))


# Of published experiments, by the file with their numbers. Thakkar et al. (2020), section 4.1: 392,000 users of about
# 2,000 words each, and 10,000 words. Its "93K examples" in total can only be 93 million, 237 a user.
PUBLISHED = {"thakkar2020.csv": Users(392_000, 392_000 * 237, 392_000 * 2_000, 10_000)}


@dataclass(frozen=True)
class Row:
    """A row of the table, over both worlds and all seeds.

    Attributes:
        name: its name.
        runs: number of its runs.
        size: users of a round, or records of a step.
        share: share of all users in a round; None for central training.
        length: number of rounds or steps.
        epochs: number of passes over all records.
    """

    name: str
    runs: int
    size: int
    share: float | None
    length: int
    epochs: float


@dataclass(frozen=True)
class Canaries:
    """A configuration of canaries.

    Attributes:
        count: number of canaries with it.
        p_u, p_e: probabilities; None if `copies` is set.
        sharers: expected number of sharers of each canary; None if `copies` is set.
        copies: expected number of copies of each canary.
        window: when it is planted, in words; empty for all rounds.
    """

    count: int
    p_u: float | None
    p_e: float | None
    sharers: float | None
    copies: float
    window: str = ""


@dataclass(frozen=True)
class Scale:
    """The size of an experiment.

    Attributes:
        users: the corpus' training users, of whose records a row may leave some out.
        rows: rows of the table.
        canaries: all configurations of canaries.
        share: expected share of all records that are canaries, in the run with the most of them.
        number: number of canaries, in the run with the most of them.
    """

    users: Users
    rows: tuple[Row, ...]
    canaries: tuple[Canaries, ...]
    share: float
    number: int


def scale_of(planned: Sequence[Planned], users: Users, train: Split) -> Scale:
    """Return the scale of runs on these users.

    Args:
        planned: at least one run.
        users: numbers of the users.
        train: the users.
    """
    return _scale(rows_of(planned), users, train)


def rows_of(planned: Sequence[Planned]) -> dict[str, list[Planned]]:
    """Return the runs of each row of the table, by its name."""
    rows: dict[str, list[Planned]] = {}
    for run in planned:
        rows.setdefault(row_name(run), []).append(run)
    return rows


def _scale(rows: Mapping[str, Sequence[Planned]], users: Users, train: Split) -> Scale:
    configs = [run.config for runs in rows.values() for run in runs[:1]]
    trained = list(dict.fromkeys((config.canaries, Users.counted(trained_on(config, train))) for config in configs))
    return Scale(
        users,
        tuple(_row(name, runs, train) for name, runs in rows.items()),
        tuple(dict.fromkeys(canaries for settings, left in trained for canaries in canaries_of(settings, left))),
        max(expected_copies(settings, left.records) / max(left.records, 1) for settings, left in trained),
        max(len(configurations(settings)) for settings, _ in trained),  # those that are compared
    )


def canaries_of(hparams: CanaryHParams, users: Users) -> tuple[Canaries, ...]:
    """Return each configuration once, in its order."""
    if not hparams.count:
        return ()
    return tuple(
        Canaries(hparams.count, None, None, None, float(one.copies), one.when)
        if one.copies is not None
        else Canaries(
            hparams.count, one.p_u, one.p_e, one.p_u * users.users, one.p_u * one.p_e * users.records, one.when
        )
        for one in distinct_configurations(hparams)
    )


def published_scale(
    definition: Definition, planned: Sequence[Planned], source: str, only: Sequence[str] = ()
) -> Scale | None:
    """Return the scale of the published runs, in the same rows; None if their users are not known.

    Args:
        definition: the sweep, whose base and axes are as published.
        planned: the runs that stand for the published ones.
        source: the definition's file, for messages.
        only: the planned grids.
    """
    users = published_users(definition)
    pairs = published_rows(definition, planned, source, only) if users else None
    return _scale(pairs, users, users.split()) if users and pairs else None


def published_users(definition: Definition) -> Users | None:
    """Return the numbers of the published training users; None if they are not known."""
    return PUBLISHED.get(definition.published.file) if definition.published else None


def published_rows(
    definition: Definition, planned: Sequence[Planned], source: str, only: Sequence[str] = ()
) -> dict[str, list[Planned]] | None:
    """Return the published runs by the rows of those that stand for them; None if they are not as many.

    The arguments are those of `published_scale`.
    """
    tier = Tier(about="", corpus=TierCorpus(path=Path()), seeds=tuple(dict.fromkeys(run.seed for run in planned)))
    theirs = planned_runs(definition, tier, Path(), source, only=only)
    if len(theirs) != len(planned):
        return None
    pairs: dict[str, list[Planned]] = {}
    for ours, other in zip(planned, theirs, strict=True):
        pairs.setdefault(row_name(ours), []).append(other)
    return pairs


def row_name(run: Planned | SweepRun) -> str:
    """Return the name of the row of a table that a run is in, without world and seed."""
    axes = [_setting_text(key, value) for key, value in run.axes.items() if key != WORLD]
    return " ".join([run.grid, *axes])


def _setting_text(key: str, value: object) -> str:
    if isinstance(value, str):
        return value
    listed = ", ".join(map(str, value)) if isinstance(value, Sequence) else value
    return f"{key.rpartition('.')[2]} {listed}"


def _row(name: str, runs: Sequence[Planned], train: Split) -> Row:
    config = runs[0].config
    train = trained_on(config, train)
    length = config.rounds_over(train)
    size = config.round_size
    share = size / len(train) if config.unit == "user" else None
    return Row(name, len(runs), size, share, length, length / config.rounds_per_epoch(train))
