"""The input of a plan: the runs of a configuration or of a sweep's tier, and their training users."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.canaries.in_corpus import settled
from flsim.data.corpus import Corpus, Split
from flsim.data.stores import located
from flsim.planning.amounts import Amount, amounts_of, published_utility
from flsim.planning.disk import corpus_bytes
from flsim.planning.scale import Scale, Users, published_rows, published_scale, published_users
from flsim.runs.config import load, toml
from flsim.sweeps import definition
from flsim.sweeps.definition import Planned
from flsim.sweeps.folder import corpus_of, corpus_or_its_settings, open_corpus, refuse_impossible_runs


@dataclass(frozen=True)
class Request:
    """The input of a plan.

    Attributes:
        name: name of the file.
        tier: the tier of a sweep; None for a run.
        planned: the runs.
        users: numbers of the training users.
        train: the training users.
        is_there: whether the corpus exists; otherwise there are as many users as in the published experiment, all
            alike.
        makes: bytes of the corpus that the sweep makes; 0 if it exists.
        whole_cluster: whether runs are trained one after another.
        published: scale of the published experiment; None if there is none.
        published_amounts: amounts of training of the published rows; None if they are not known.
        source: name of the published experiment.
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
    published_amounts: tuple[Amount, ...] | None = None
    source: str | None = None


def read_request(
    file: Path,
    folder: Path,
    tier: str | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    corpus: Path | str | None = None,
    overrides: Sequence[str] = (),
) -> Request:
    """Read the input of a plan.

    Args:
        file: the file of a run, or of a sweep, which has grids.
        folder: the folder for a synthetic corpus, which is made to be measured.
        tier: tier of the sweep.
        seeds: seeds of the sweep.
        only: grids of the sweep to plan; all if empty.
        corpus: the corpus to train on, in place of the file's.
        overrides: changes of settings, as ``section.key=value``.

    Raises:
        InputError: the file is wrong, an option does not apply to it, no run could have its settings, or the corpus
            does not exist and its users are not known.
    """
    if "grids" not in toml.read(file):
        for option, value in (("--tier", tier), ("--seeds", seeds), ("--only", only)):
            if value:
                raise InputError(f"{option} is for a sweep, and {file} is a run's configuration; remove it")
        return _request_of_run(file, corpus, overrides)
    return _request_of_sweep(file, folder, tier or "smoke", seeds, only, corpus, overrides)


def _request_of_run(file: Path, corpus: Path | str | None, overrides: Sequence[str]) -> Request:
    config = load(file, overrides)
    if corpus is not None:
        config = replace(config, data=replace(config.data, corpus=located(corpus)))
    opened = Corpus.open(config.data.corpus)
    config = replace(config, canaries=settled(opened, config.canaries))
    run = Planned(file.stem, file.stem, config.seed, {}, None, config)
    refuse_impossible_runs([run], opened)
    return Request(file.stem, None, [run], Users.in_corpus(opened), opened.split("train"))


def _request_of_sweep(
    file: Path,
    folder: Path,
    tier: str,
    seeds: Sequence[int] | None,
    only: Sequence[str],
    corpus: Path | str | None,
    overrides: Sequence[str],
) -> Request:
    sweep = definition.load(file)
    at = definition.tier_of(sweep, tier, str(file))
    users, makes = None, 0
    try:
        path = corpus or corpus_of(at, file, folder)
    except InputError as error:
        users = published_users(sweep)
        if users is None:
            raise
        path = folder / "corpus"
        say(f"{error}; until then the plan assumes the published number of users, all alike, and measures nothing")
    planned = definition.planned_runs(sweep, at, path, str(file), seeds, only, overrides)
    train = users.split() if users else None
    refuse_impossible_runs(planned, corpus_or_its_settings(at, path, folder) if train is None else train)
    if users is None or train is None:
        opened = open_corpus(at, path, folder)
        users, train = Users.in_corpus(opened), opened.split("train")
        makes = corpus_bytes(opened) if opened.path.parent == folder else 0
    their_users = published_users(sweep)
    theirs = published_rows(sweep, planned, str(file), only) if their_users else None
    return Request(
        file.stem,
        tier,
        planned,
        users,
        train,
        is_there=train.folder != Path(),
        makes=makes,
        whole_cluster=at.whole_cluster,
        published=published_scale(sweep, planned, str(file), only),
        published_amounts=amounts_of(theirs, their_users.split(), published_utility(theirs))
        if theirs and their_users
        else None,
        source=sweep.published.source if sweep.published else None,
    )
