"""What is to be planned: the runs of a configuration or of a sweep's tier, and the users they train on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.canaries.in_corpus import settled
from flsim.data.corpus import Corpus, Split
from flsim.data.stores import located
from flsim.planning.disk import corpus_bytes
from flsim.planning.scale import PUBLISHED, Scale, Users, published_scale
from flsim.runs.config import load, toml
from flsim.sweeps import definition
from flsim.sweeps.definition import Planned
from flsim.sweeps.folder import corpus_of, open_corpus


@dataclass(frozen=True)
class Given:
    """What is to be planned.

    Attributes:
        name: of the file.
        tier: of a sweep; None of a run.
        planned: the runs.
        users, train: who is trained on.
        is_there: whether they are; else they are as many as in the published experiment, and all alike.
        makes: bytes of the corpus that the sweep makes; 0 where it is there.
        whole_cluster: runs are trained one after another.
        published: scale of the published experiment; None where there is none.
        source: of that, in words.
    """

    name: str
    tier: str | None
    planned: Sequence[Planned]
    users: Users
    train: Split
    is_there: bool = True
    makes: int = 0
    whole_cluster: bool = True
    published: Scale | None = None
    source: str | None = None


def given(
    file: Path,
    folder: Path,
    tier: str | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    corpus: Path | str | None = None,
    overrides: Sequence[str] = (),
) -> Given:
    """Read what is to be planned.

    Args:
        file: of a run, or of a sweep, which has grids.
        folder: for a synthetic corpus, which is made to be measured.
        tier, seeds, only, corpus, overrides: as of `flsim sweep`; of a run only the last two.

    Raises:
        InputError: the file is wrong, an option is not for it, or the corpus is not there and nobody knows its users.
    """
    if "grids" not in toml.read(file):
        for option, value in (("--tier", tier), ("--seeds", seeds), ("--only", only)):
            if value:
                raise InputError(f"{option} is for a sweep, and {file} is a run's configuration; remove it")
        return _given_run(file, corpus, overrides)
    return _given_sweep(file, folder, tier or "smoke", seeds, only, corpus, overrides)


def _given_run(file: Path, corpus: Path | str | None, overrides: Sequence[str]) -> Given:
    config = load(file, overrides)
    if corpus is not None:
        config = replace(config, data=replace(config.data, corpus=located(corpus)))
    there = Corpus.open(config.data.corpus)
    config = replace(config, canaries=settled(there, config.canaries))
    run = Planned(file.stem, file.stem, config.seed, {}, None, config)
    return Given(file.stem, None, [run], Users.of(there), there.split("train"))


def _given_sweep(
    file: Path,
    folder: Path,
    tier: str,
    seeds: Sequence[int] | None,
    only: Sequence[str],
    corpus: Path | str | None,
    overrides: Sequence[str],
) -> Given:
    found = definition.load(file)
    at = definition.tier_of(found, tier, str(file))
    users, makes = None, 0
    try:
        path = corpus or corpus_of(at, file, folder)
    except InputError as error:
        users = PUBLISHED.get(found.published.file) if found.published else None
        if users is None:
            raise
        path = folder / "corpus"
        say(f"{error}; until then the plan assumes the published number of users, all alike, and measures nothing")
    planned = definition.planned_runs(found, at, path, str(file), seeds, only, overrides)
    train = users.split() if users else None
    if users is None or train is None:
        there = open_corpus(at, path, folder)
        users, train = Users.of(there), there.split("train")
        makes = corpus_bytes(there) if there.path.parent == folder else 0
    return Given(
        file.stem,
        tier,
        planned,
        users,
        train,
        is_there=train.folder != Path(),
        makes=makes,
        whole_cluster=at.whole_cluster,
        published=published_scale(found, planned, str(file), only),
        source=found.published.source if found.published else None,
    )
