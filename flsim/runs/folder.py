"""A run folder, which contains all files of a run. Only this module knows the paths of these files.

A round of central training is a step. Each run folder has the list below in its README.

config.toml      all settings, defaults included
code/            copies of custom files that the settings name (flsim.runs.config.custom_code)
tokens.i64       the base model's id of each token id of the corpus, if a tokenizer made the corpus
planted/         planted canaries, roster, IID twin (flsim.canaries.population)
checkpoints/     round-000010.safetensors, ...
users/           what users keep between rounds, if the algorithm needs it (flsim.algorithms.user_states)
rows/            round-000010.parquet, ...: results of evaluations
membership/      round-000010.parquet, ...: results of attacks on membership (flsim.attacks.membership.inference)
evaluations.jsonl  a line per attempt to evaluate a checkpoint: outcome, seconds, reason
rounds.jsonl     a line per round (central training: per saved step), with loss, seconds, ... (flsim.runs.roundlog)
micro-cohorts.jsonl  how many users train at once, where users are stacked (flsim.algorithms.micro_cohorts)
log.jsonl        events, for people and machines (flsim.base.logs)
run.json         name, setting, partition, status, round; digests of the configuration and of the corpus
tensorboard/, mlflow/, wandb/  the numbers of rounds and evaluations, for trackers (flsim.runs.trackers)
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import pandas as pd
import torch

from flsim.algorithms import checkpoint
from flsim.algorithms.micro_cohorts import MicroCohorts
from flsim.algorithms.user_states import FOLDER, UserStates
from flsim.base.errors import Diverged, InputError
from flsim.base.extensions import custom_code_errors, is_custom, short_name
from flsim.base.files import digest, new_file, new_folder, refuse_unwritable, write_json
from flsim.base.machine import refuse_missing_device
from flsim.base.progress import tracked
from flsim.base.settings import flat
from flsim.canaries.planting import say_crowded
from flsim.canaries.population import (
    Population,
    adopt_population,
    open_population,
    planting_of,
    refuse_other_run,
    verify_population,
    write_population,
)
from flsim.canaries.spec import Canary
from flsim.data.corpus import Corpus, Split, labelled_steps
from flsim.data.tokenizer import TABLE
from flsim.measures.quantity import Quantity
from flsim.models.architectures import ModelHParams
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import TrainableModel
from flsim.privacy import ledger
from flsim.results.rows import (
    DIVERGED,
    MEASUREMENTS,
    Row,
    identity_of,
    read_rows_of,
    read_run,
    read_run_file,
    refuse_begun,
    refuse_foreign_rows,
    setting_of,
    write_rows,
)
from flsim.runs import roundlog
from flsim.runs.config import CentralConfig, Config, FederatedConfig, custom_code, dump, load
from flsim.runs.config.base import shared_rounds
from flsim.runs.config.custom_code import announce
from flsim.runs.config.participation import of_extra
from flsim.runs.evaluate import evaluate, own_quantities, refuse_failing, write_on
from flsim.runs.foresight import foresee_training, settled_on
from flsim.runs.loading import model_of_factory
from flsim.runs.trackers import refuse_missing
from flsim.training.own_model import frozen_digest, refuse_unfit
from flsim.training.update import State, Training

README = f"""\
This folder is one run of flsim: its settings, canaries, trained models and measurements. `flsim table FOLDER`
shows the results; `flsim run CONFIG --out FOLDER --resume` continues the run. A round of central training is a step.

{str(__doc__).split("README.", 1)[-1].strip()}
"""
Settings = TypeVar("Settings", bound=Config)
Status = Literal["running", "completed", "diverged", "failed", "interrupted"]


@dataclass(frozen=True)
class Run:
    """A run on disk, with its settings, users, canaries, rounds and checkpoints.

    Attributes:
        path: the run folder.
        config: all settings of the run.

    Examples:
        >>> flsim.open_run("runs/demo").setting                                # doctest: +SKIP
    """

    path: Path
    config: Config

    @classmethod
    def create(cls, settings: Config, path: Path) -> "Run":
        """Check the corpus, plant the canaries, and create the folder, atomically; InputError for a wrong setting."""
        refuse_missing(settings.system.tracking)
        refuse_begun(path)
        with new_folder(path) as folder:
            corpus = Corpus.open(settings.data.corpus, verify=True)
            settings = settled_on(settings, corpus)
            train = settings.data.without_withheld(corpus.split("train"), settings.seed)
            refuse_unfit(settings.model, corpus.layout, settings.seed)
            foresee_training(settings, train, corpus)
            if not len(corpus.test_users):
                raise InputError(f"{corpus.path}: has no test users for utility; import it with a larger --test")
            planting = planting_of(corpus, settings.canaries, settings.seed, train, settings.rounds_over(train))
            planting.say_absent()
            say_crowded(len(planting.overlay.records) / train.records)
            refuse_failing(settings.model, planting.canaries, corpus.test_users, settings.evaluation, settings.seed)
            dump(with_copies(settings, folder), folder / "config.toml")
            for name in ("planted", "checkpoints", "rows"):
                (folder / name).mkdir()
            identity = identity_of(settings.digest, corpus.digest)
            partition = settings.data.partition
            write_population(folder / "planted", corpus, planting, partition, settings.seed, train, identity)
            (folder / "README").write_text(README, encoding="utf-8")
        run = cls(path, with_copies(settings, path))
        run.mark("running")
        return run

    @classmethod
    def reopen(cls, settings: Config, path: Path) -> "Run":
        """Return a run to continue with `settings`, which can differ in the length of training and the use of machines.

        Nothing in the folder changes; `record` writes the settings after the run is locked and all checks have passed.
        InputError without such a run; if settings would change its results, or have fewer rounds than are trained; if
        its files have changed, its rows belong to another run, or its folder of checkpoints is missing.
        """
        refuse_missing(settings.system.tracking)
        started = cls.open(path)
        corpus = Corpus.open(settings.data.corpus)
        settings = settled_on(settings, corpus).resuming(started.config)
        if started.config.model.digest not in (None, settings.model.digest):
            raise InputError(
                f"{path}: was started with another base than {settings.model.path}, or files of the base changed "
                "since; restore them, or name a new --out"
            )
        custom_code.refuse_other_settings(started.config, settings, path)
        run = cls(path, with_copies(settings, path))
        run.verify()
        custom_code.announce(run.config)
        refuse_unfit(run.config.model, corpus.layout, settings.seed, is_new=False)
        refuse_foreign_rows(path, run.identity)
        if not (checkpoints := path / "checkpoints").is_dir():
            raise InputError(
                f"{checkpoints}: no such folder; restore it, or create an empty folder to train the run again from "
                "the beginning"
            )
        rounds = map(checkpoint.round_of, checkpoint.all_in(checkpoints))
        trained = max((round_ for round_ in rounds if round_ <= started.rounds), default=0)  # others are misnamed
        if trained > run.rounds:
            raise InputError(
                f"{path}: {trained:,} rounds are trained already, and the settings have {run.rounds:,}; a "
                f"resumed run can only become longer; set at least {trained:,} rounds, or train a new run"
            )
        run.config.say_end(run.config.rounds_asked(run.train), run.rounds)
        return run

    def record(self) -> None:
        """Replace the settings in config.toml. The caller must hold the lock of the run."""
        with new_file(self.path / "config.toml") as partial:
            dump(self.config, partial)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open a run folder; raise InputError if `path` is not a run folder, or has only measurements."""
        if (path / MEASUREMENTS).is_file():
            raise InputError(
                f"{path}: this folder has measurements of a model that was trained elsewhere, and this command needs "
                "a run with its training, users and checkpoints; name a run folder"
            )
        if not (path / "config.toml").is_file():
            raise InputError(f"{path}: not a run folder (it has no config.toml); create one with `flsim run`")
        return cls(path, load(path / "config.toml"))

    @property
    def name(self) -> str:
        """Return the current name of the folder, for any form of its path."""
        return self.path.resolve().name

    @property
    def identity(self) -> str:
        """Identity of the run, independent of its place: digests of its settings, with the seed, and of its corpus."""
        return identity_of(self.config.digest, self.corpus.digest)

    @property
    def setting(self) -> str:
        """Return the name of the run's row in a table, from its configuration and the steps applied to the corpus."""
        return setting_of(self.config.partition, self.label)

    @property
    def label(self) -> str:
        """Return the `setting` without the partition."""
        return ", ".join([self.config.label, *(step["label"] for step in labelled_steps(self.corpus))])

    @property
    def series(self) -> str:
        """Digest that runs share if they differ only in seeds, of the run or of the corpus."""
        return digest(self.config.series, json.dumps(labelled_steps(self.corpus), sort_keys=True))

    @property
    def parameters(self) -> dict[str, Any]:
        """Return all settings by name, such as ``training.cohort``, for lists of runs."""
        return {"setting": self.setting, "series": self.series, **dict(flat(custom_code.without_folders(self.config)))}

    @cached_property
    def corpus(self) -> Corpus:
        """Return the corpus, which is opened at its first use."""
        return Corpus.open(self.config.data.corpus)

    @cached_property
    def train(self) -> Split:
        """Return the users and records of the corpus that the run trains on, without canaries."""
        return self.users.split if self.config.data.leaves_out else self.corpus.split("train")

    @cached_property
    def _population(self) -> tuple[Population, tuple[Canary, ...]]:
        refuse_other_run(self.path / "planted", self.identity)
        return open_population(self.path / "planted", self.corpus)

    @property
    def users(self) -> Population:
        """Return the training users, with planted canaries."""
        return self._population[0]

    @property
    def canaries(self) -> tuple[Canary, ...]:
        """Return the planted canaries."""
        return self._population[1]

    @cached_property
    def provenance(self) -> checkpoint.Provenance:
        """Return the provenance in checkpoints of this run. This executes a custom model."""
        return self._with_frozen(frozen_digest(self.corpus.layout.vocabulary_size, self.config.model))

    def _with_frozen(self, frozen: str) -> checkpoint.Provenance:
        size = self.corpus.layout.vocabulary_size
        return checkpoint.Provenance(self.config.digest, self.corpus.digest, size, self.config.model, frozen)

    @property
    def federated(self) -> FederatedConfig:
        """Return the settings of a federated run; InputError is raised for a central run."""
        if not isinstance(self.config, FederatedConfig):
            raise InputError(
                f"{self.path}: training is central, which has no clients; continue this run with `flsim run`"
            )
        return self.config

    @property
    def central(self) -> CentralConfig:
        """Return the settings of a central run; InputError is raised for a federated run."""
        if not isinstance(self.config, CentralConfig):
            raise InputError(f"{self.path}: training is federated; continue it with `flsim run`")
        return self.config

    @cached_property
    def rounds(self) -> int:
        """Return the number of rounds to train; for central training, the number of steps."""
        return self.config.rounds_over(self.train)

    @cached_property
    def rounds_per_epoch(self) -> float:
        """Return the number of rounds that read as many records as the corpus has."""
        return self.config.rounds_per_epoch(self.train)

    @cached_property
    def population(self) -> int:
        """Return the number of users, or of records, that an epsilon protects."""
        return self.config.protected(self.train)

    def training(self, device: str | None = None) -> Training:
        """Return the training of this run's users, for this process and a device of torch."""
        states, sizes = UserStates(self.path / FOLDER, is_read_only=True), MicroCohorts(self.path, is_read_only=True)
        return self.config.training_of(self.users, self.rounds, device, states, sizes)

    @property
    def oldest_round(self) -> int:
        """Round of the older of the two checkpoints that a resume may continue from; 0 if there are fewer."""
        rounds = [checkpoint.round_of(path) for path in checkpoint.all_in(self.path / "checkpoints")]
        return rounds[-2] if len(rounds) > 1 else 0

    @property
    def last_round(self) -> int:
        """Return the last round in rounds.jsonl; 0 if there is none."""
        return max((line["round"] for line in roundlog.read(self.path)), default=0)

    def latest_state(self) -> State:
        """Return the newest checkpoint's state, or a new model's state if there is no checkpoint."""
        newest = checkpoint.latest(self.path / "checkpoints")
        return self.training().first_state() if newest is None else self.load(newest)

    def load(self, path: Path, executes_code: bool = True) -> State:
        """Load a checkpoint of this run; without custom code, frozen parameters of a custom model are not compared.

        Raises InputError if it is damaged; `checkpoint.ForeignCheckpointError` if it is of another run.
        """
        state, stored = checkpoint.load(path)
        here = (self.provenance if executes_code else self._with_frozen(stored.frozen)).by_content
        if (here.vocabulary_size, here.model, here.frozen) != (stored.vocabulary_size, stored.model, stored.frozen):
            why = f"this checkpoint has another model ({stored.sizes}); {self.path} has {here.sizes}"
        elif here.corpus != stored.corpus:
            corpus = self.config.data.corpus
            why = f"this checkpoint was trained on another corpus than {corpus}; restore the corpus or train again"
        elif here.config != stored.config:
            other = f"other settings than {self.path / 'config.toml'}"
            why = f"this checkpoint was trained with {other}; name the run of the checkpoint"
        elif foreign := self._custom_code_beyond_settings(state):
            other = f"{foreign}, which {self.path / 'config.toml'} does not"
            why = f"its ledger names {other}; name the run of the checkpoint"
        else:
            return state
        raise checkpoint.ForeignCheckpointError(f"{path}: {why}")

    def _custom_code_beyond_settings(self, state: State) -> str:
        """Return the custom sampler or noise that only a state's ledger has, which an epsilon would execute; or ""."""
        for entry in state.ledger.entries:
            if is_custom(entry.sampler) or is_custom(entry.noise):
                planned = self.config.planned(entry.population, entry.rounds)
                for name, expected in ((entry.sampler, planned.sampler), (entry.noise, planned.noise)):
                    if is_custom(name) and name != expected:
                        return name
        return ""

    def save(self, state: State) -> Path:
        """Write a checkpoint, then remove older checkpoints, except those to keep and the last one."""
        folder = self.path / "checkpoints"
        roundlog.keep(self.path)
        path = checkpoint.save(folder, state, self.provenance)
        for older in [older for older in checkpoint.all_in(folder) if checkpoint.round_of(older) < state.round][:-1]:
            if not self.is_kept_at(checkpoint.round_of(older)):
                older.unlink()
        return path

    def verify(self) -> None:
        """Raise InputError if a file of the corpus, of the planted canaries or of the custom code has changed."""
        custom_code.refuse_changed_copies(self.config)
        corpus = self.config.data.corpus
        if Corpus.open(corpus, verify=True).digest != self.corpus.digest:
            raise InputError(
                f"{corpus}: the corpus changed while flsim used it; restore the corpus, and resume the run"
            )
        verify_population(self.path / "planted")
        refuse_other_run(self.path / "planted", self.identity)

    def is_evaluated_at(self, round_: int) -> bool:
        """Return whether the schedule evaluates after this many rounds."""
        return round_ == self.rounds or self.config.evaluation.is_due(round_, self.rounds_per_epoch)

    @cached_property
    def parting(self) -> int:
        """Return the round with which the run of the other `canaries.arm` can begin; 0 if there is none."""
        return shared_rounds(self.config, self.rounds)

    def is_kept_at(self, round_: int) -> bool:
        return self.is_evaluated_at(round_) or round_ == self.parting

    def is_saved_at(self, round_: int) -> bool:
        return self.is_kept_at(round_) or round_ % self.config.system.checkpoint_every == 0

    def unevaluated(self) -> list[Path]:
        """Return checkpoints that are due for evaluation and have no rows yet, oldest first."""
        return [path for path in checkpoint.all_in(self.path / "checkpoints") if self.lacks_rows(path)]

    def lacks_rows(self, path: Path) -> bool:
        """Return whether a checkpoint is due for evaluation and has no rows yet."""
        evaluated = (self.path / "rows" / f"{path.stem}.parquet").exists()
        return self.is_evaluated_at(checkpoint.round_of(path)) and not evaluated

    def mark(self, status: Status, reason: str | None = None) -> None:
        """Write run.json with the status and the round of the newest checkpoint."""
        newest = checkpoint.latest(self.path / "checkpoints")
        described = {
            "name": self.name,
            "config": self.config.digest,
            "corpus": self.corpus.digest,
            "setting": self.setting,
            "partition": self.config.partition,
            "label": self.label,
            "status": status,
            "reason": reason,
            "round": checkpoint.round_of(newest) if newest else 0,
            "rounds": self.rounds,
            "rounds_per_epoch": self.rounds_per_epoch,
            "seed": self.config.seed,
            "series": self.series,
        }
        write_json(self.path / "run.json", described)

    def log_round(self, **values: Any) -> dict[str, Any]:
        """Append a line to rounds.jsonl, and return it."""
        roundlog.append(self.path, **values)
        return values

    def epsilons(self, state: State) -> dict[str, float]:
        """Return the epsilons of the state's rounds by the name of the convention; empty without noise."""
        is_private = self.config.privacy.mechanism == "dp"
        return ledger.spent(state.ledger, self.config.sampler, self.delta) if is_private else {}

    @property
    def delta(self) -> float:
        """Return the delta of the reported (epsilon, delta)."""
        return self.config.privacy.delta_for(self.population)


def with_copies(settings: Settings, folder: Path) -> Settings:
    """Copy the files of a user's own, and the ids of a base model's tokens; return settings that name the copies."""
    settings = custom_code.with_copies(settings, folder)
    if settings.model.tokens is None:
        return settings
    copy = folder.resolve() / TABLE
    if not copy.exists():
        with new_file(copy) as partial:
            partial.write_bytes(Path(settings.model.tokens).read_bytes())
    return replace(settings, model=replace(settings.model, tokens=str(copy)))


def participation(run: Run, rounds: int) -> pd.DataFrame:
    """Return the participation of sharers in the first rounds of a run; in central training, steps that read a copy.

    A sharer is a user who holds a copy, synthetic in the IID partition; for an injected canary, a pseudo-user, whose
    number follows those of users. It read all its copies, unless local.max_records limited it to some of its records.
    Columns are ``round`` (from 1), ``canary`` (its id) and ``user``, in this order.
    """
    at, canary, user = run.config.meetings(run.users, rounds)
    extra = of_extra(run.users, rounds, is_by_copy=run.config.unit == "record")
    is_planted = run.users.is_planted_in(canary, at)
    met = (values[is_planted] for values in (at, canary, user))
    at, canary, user = (np.concatenate(pair) for pair in zip(met, extra, strict=True))
    ids = np.array([canary.id for canary in run.canaries], object)
    order = np.lexsort((user, canary, at))
    return pd.DataFrame({"round": at[order], "canary": ids[canary[order]], "user": user[order]})


# Measurement of a checkpoint with the settings of its run; results are stored as rows of the run.
#
# A run can be measured with weights of few bits as a new run: one training then gives two rows of a table.

BASE = Path("base")  # in place of a checkpoint: the model before training


@custom_code_errors()
def evaluate_checkpoint(
    run: Path, path: str | Path, device: str = "cpu", calibrate: Sequence[Path] = (), **changes: Any
) -> list[Row]:
    """Measure a checkpoint and store its rows in the run; equal measurements store equal rows.

    `calibrate` are checkpoints of runs without these canaries, or `BASE`, whose mean scores calibrate the exposures;
    `changes` are of the run's `EvaluationHParams`. InputError if a checkpoint is not of its run, the corpus changed, or
    a run for calibration had one of the canaries; Diverged, which a row records, if parameters are not finite.
    """
    opened = Run.open(Path(run))
    state, model = restored_model(opened, Path(path), device)
    without = [other_model(opened, other, device, "--calibrate", _unfit_to_calibrate) for other in calibrate]
    hparams = replace(opened.config.evaluation, **changes)
    try:
        rows = evaluate(
            model,
            opened.canaries,
            opened.corpus.test_users,
            hparams,
            opened.config.seed,
            opened.identity,
            state.round,
            without,
        )
        if spent := opened.epsilons(state):
            prefix = "" if opened.config.unit == "user" else f"{opened.config.unit} "
            measured = {f"{prefix}epsilon {name}": value for name, value in spent.items()}
            measured[f"{prefix}delta"] = opened.delta
            rows += [Row(opened.identity, state.round, metric, "", value) for metric, value in measured.items()]
        opened.verify()  # measurements on other data must not be stored
        kept, own = _not_measured_again(opened, state.round, rows)
        write_rows(opened.path, state.round, [*rows, *kept], [*own_quantities(hparams.also), *own])
    except Diverged:
        write_rows(opened.path, state.round, [Row(opened.identity, state.round, DIVERGED, "", 1.0)])
        raise
    return rows


def _not_measured_again(run: Run, round: int, rows: Sequence[Row]) -> tuple[list[Row], list[Quantity]]:
    """Return the stored rows of a round whose metrics are not among `rows`, and the quantities of custom measures."""
    path, measured = run.path / "rows" / f"round-{round:06d}.parquet", {row.metric for row in rows}
    try:
        stored, own = read_rows_of(path, run.identity, [canary.id for canary in run.canaries])
    except (OSError, InputError):  # there are none, or they are damaged or of another run, and are replaced
        return [], []
    stored = stored.loc[~stored["metric"].isin({*measured, DIVERGED}), [field.name for field in fields(Row)]]
    kept = [Row(*values) for values in stored.itertuples(index=False)]
    return kept, [one for name, one in own.items() if name not in measured]


def evaluate_where_writable(
    run: Path, path: str | Path, device: str = "cpu", calibrate: Sequence[Path] = (), **changes: Any
) -> list[Row]:
    """Measure a checkpoint as `evaluate_checkpoint` for a user; InputError before that if rows cannot be stored."""
    refuse_unwritable(run, "rows")
    config = Run.open(run).config
    announce_evaluation(replace(config, evaluation=replace(config.evaluation, **changes)))
    return evaluate_checkpoint(run, path, device, calibrate, **changes)


def announce_evaluation(config: Config) -> None:
    """Print the files of custom code that evaluations with these settings will execute."""
    accounting = ("sampler", "noise") if config.privacy.mechanism == "dp" else ()
    announce(config, "architecture", "measure", *accounting)


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest undamaged checkpoint of a run folder; raise InputError if there is none."""
    path = checkpoint.latest(folder / "checkpoints")
    if path is None:
        trained = read_run_file(folder)["round"]
        what = "; restore checkpoints/" if trained else " yet; wait for the first checkpoint"
        raise InputError(f"{folder}: the run has no checkpoint{what}, or name another run")
    return path


def written_after(run: Run, round: int, device: str = "cpu") -> dict[str, tuple[int, ...]]:
    """Return the phrases that beam search generates with a round's checkpoint: token ids by canary id.

    Raises InputError if the checkpoint is missing or of another run, Diverged if its parameters are not finite.
    """
    path = run.path / "checkpoints" / checkpoint.checkpoint_name(round)
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint, so the model cannot write text; remove --written")
    _, model = restored_model(run, path, device)
    return write_on(model, run.canaries, run.corpus.layout, run.config.evaluation)


def restored_model(run: Run, path: Path, device: str) -> tuple[State, TrainableModel]:
    """Return the state of a run's checkpoint and its model on a device; raise InputError for a foreign checkpoint."""
    state = run.load(path)
    model = checkpoint.model_of(run.provenance)
    return state, model.load(state.params).to(torch.device(device))


def base_of(run: Run, device: str) -> TrainableModel:
    """Return the base model of a run, as before training; raise InputError for runs without a base model."""
    if run.config.model.architecture != "hf":
        raise InputError(f'{run.path}: has no base; "{BASE}" is for runs of architecture "hf"; name a checkpoint')
    model = checkpoint.model_of(run.provenance).initialize(run.config.seed)
    return model.to(torch.device(device))


def other_model(run: Run, path: Path, device: str, option: str, unfit: Callable[[Run, Run], str]) -> TrainableModel:
    """Return the base of a run, or the model of a checkpoint of another run; InputError if `unfit` returns a reason."""
    if path == BASE:
        return base_of(run, device)
    if not path.is_file():
        raise InputError(f"{option} {path}: no such checkpoint; name a file in the folder checkpoints/ of a run")
    other = Run.open(path.resolve().parent.parent)
    if why := unfit(run, other):
        raise InputError(f"{option} {path}: {why}")
    announce(other.config, "architecture")
    return restored_model(other, path, device)[1]


def _unfit_to_calibrate(run: Run, other: Run) -> str:
    """Return why the scores of another run cannot calibrate those of the run's canaries; empty if they can."""
    if other.corpus.digest != run.corpus.digest:
        return f"this checkpoint was trained on another corpus than {run.path}; calibrate with runs on the same corpus"
    seen = {canary.tokens for canary in other.canaries} & {canary.tokens for canary in run.canaries}
    what = f"this checkpoint was trained with {len(seen)} of the measured canaries"
    return f"{what}; calibrate with a run of another seed" if seen else ""


def quantize_run(source: Path, out: Path, bits: int, device: str = "cpu") -> Run:
    """Copy a run's evaluated checkpoints to a new run, and measure them with weights of `bits` bits.

    Weights are rounded only for the measurement, not in checkpoints. Raises InputError if `out` exists, `bits` is out
    of range, or the run has no evaluated checkpoint or is quantized; after any error, there is no new folder.
    """
    refuse_missing_device(device)
    run = Run.open(source)
    if run.config.evaluation.weight_bits is not None:
        raise InputError(
            f"{source}: this run is already measured with {run.config.evaluation.weight_bits} bits; name another run"
        )
    settings = replace(run.config, evaluation=replace(run.config.evaluation, weight_bits=bits))
    results = read_run(source)
    names = [checkpoint.checkpoint_name(round_) for round_ in results.evaluated]
    evaluated = [name for name in names if (source / "checkpoints" / name).is_file()]
    if not evaluated:
        raise InputError(f"{source}: the run has no evaluated checkpoint; wait for the first evaluation")
    run.verify()  # a message about damaged files then names the source, not the hidden new folder
    _ = run.canaries
    announce_evaluation(settings)
    with new_folder(out) as folder:
        dump(with_copies(settings, folder), folder / "config.toml")
        shutil.copytree(source / "planted", folder / "planted")
        adopt_population(folder / "planted", identity_of(settings.digest, run.corpus.digest))
        (folder / "checkpoints").mkdir()
        (folder / "rows").mkdir()
        provenance = replace(run.provenance, config=settings.digest)
        for name in evaluated:
            checkpoint.save(folder / "checkpoints", run.load(source / "checkpoints" / name), provenance)
        for name in tracked(f"{out.name}: evaluating", evaluated):  # the folder is removed if an evaluation fails
            evaluate_checkpoint(folder, folder / "checkpoints" / name, device)
    quantized = Run(out, with_copies(settings, out))
    quantized.mark(cast(Status, results.status), results.reason)
    return quantized


# The network of a checkpoint, or another model, for code that reads or measures it.


def load_model(model: Path | str, device: str = "cpu") -> Any:
    """Return the network of a checkpoint, or the result of a factory, whose code is executed.

    Args:
        model: a checkpoint file (.safetensors), which does not need the corpus of its run; or
            ``package.module:factory``, or ``path/to/model.py:factory``, a function without arguments that returns a
            model.
        device: torch device of a checkpoint's network, such as "cuda".

    Returns:
        For a checkpoint a `flsim.models.language_model.TrainableModel`, a torch module in evaluation mode; for a
        factory, the result of the factory.

    Raises:
        InputError: the file is not a checkpoint; the checkpoint has a custom network and is not in its run folder, or
            files of the network changed; or the factory does not exist, or failed.

    Examples:
        >>> network = flsim.load_model("runs/iid/checkpoints/round-000200.safetensors")            # doctest: +SKIP
        >>> torch.save(network.state_dict(), "weights.pt")                     # doctest: +SKIP
        >>> model = flsim.load_model("my_model.py:factory")                    # doctest: +SKIP
        >>> flsim.evaluate(model, users, references=20_000)                    # doctest: +SKIP
    """
    refuse_missing_device(device, "device")
    if not str(model).endswith(checkpoint.SUFFIX):
        return model_of_factory(str(model))
    path = Path(model)
    state, provenance = checkpoint.load(path)
    if is_custom(provenance.model.architecture) or provenance.model.architecture == "hf":
        provenance = replace(provenance, model=_own_model(path, provenance.model))
    with custom_code_errors(InputError):
        network = checkpoint.model_of(provenance).load(state.params)
        frozen = frozen_digest(provenance.vocabulary_size, provenance.model)
    if frozen != provenance.frozen:
        raise InputError(f"{path}: frozen parameters of the network changed; restore their files")
    return network.to(torch.device(device))


def export_network(run: Path, out: Path, round_: int | None = None, merge: bool = False) -> None:
    """Write a checkpoint of architecture "hf" as a folder for peft or transformers; InputError if `out` exists."""
    opened = Run.open(run)
    path = newest_checkpoint(run) if round_ is None else run / "checkpoints" / checkpoint.checkpoint_name(round_)
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint; name another --round, or leave it out for the newest one")
    if opened.config.model.architecture != "hf":
        raise InputError(f'{run}: is of architecture "{opened.config.model.architecture}"; only "hf" is exported')
    if (bits := opened.config.evaluation.weight_bits) is not None:
        raise InputError(
            f"{run}: was measured with weights of {bits} bits, and its checkpoints have all bits; export the "
            "run that it is made from"
        )
    _, model = restored_model(opened, path, "cpu")
    lora, tokens = opened.config.model.lora, opened.corpus.token_map
    with new_folder(out) as folder:
        if isinstance(model, HuggingFaceModel):
            model.export(folder, merge)
        if tokens is not None and (merge or lora is None):
            for file in tokens.folder.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())


def _own_model(path: Path, saved: ModelHParams) -> ModelHParams:
    """Return the settings of a custom network or a base model, whose files the run's settings name."""
    settings = path.resolve().parent.parent / "config.toml"
    if not settings.is_file():
        name = short_name(saved.architecture)
        raise InputError(f"{path}: this checkpoint needs the files of {name}; move it back to its run folder")
    model = load(settings).model
    if checkpoint.by_content_of(model) != saved:
        raise InputError(f"{path}: the network differs from that of {settings}; move the checkpoint to its run folder")
    return model
