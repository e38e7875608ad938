"""A run under attack: the attacked model, further models, and storing of rows in the run folder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from flsim.algorithms import checkpoint
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.subject import claim_of
from flsim.attacks.membership.candidates import Candidates
from flsim.attacks.membership.stored import FOLDER, SCHEMA, write_rows
from flsim.attacks.membership.targets import Targets, targets_of, unigram_of
from flsim.attacks.result import Result
from flsim.base.errors import InputError
from flsim.base.files import refuse_unwritable
from flsim.base.machine import refuse_missing_device
from flsim.base.settings import Count, settings
from flsim.data.records import Records
from flsim.models.language_model import TrainableModel
from flsim.models.quantization import quantized
from flsim.results.sweeps import over_runs
from flsim.runs.config.custom_code import announce
from flsim.runs.folder import Run
from flsim.runs.measuring import BASE, base_of, newest_checkpoint, restored_model
from flsim.training.state import State

CONFOUNDED = 0.55  # area of the control above which members differ from non-members without a model


@settings
class ElsewhereHParams:
    """Settings of an attack on a model that was trained elsewhere; without files of records, its canaries are attacked.

    `model` is its factory (see `flsim.runs.elsewhere.MeasuredModel.open`). `members` and `others` are files (.jsonl,
    .csv or .parquet) of records that training read, or did not read, with the columns `text` and, for personal data,
    `user`.
    """

    model: str | None = None
    members: Path | None = None
    others: Path | None = None
    text: str = "text"
    user: str = "user"

    def __post_init__(self) -> None:
        if (self.members is None) != (self.others is None):
            raise InputError("--members and --non-members: an attack compares both; name both files")

    def refuse_for(self, run: Path) -> None:
        """Raise InputError for a run of flsim, which stores model and records."""
        if self.model is not None or self.members is not None:
            name = "--members" if self.model is None else "--model"
            raise InputError(f"{name}: {run} is a run of flsim, which stores model and records; remove the option")


@settings
class AttackHParams:
    """Settings of an attack on a run, for any unit; see `flsim.infer_membership`."""

    count: Count = 1_000
    round: int | None = None
    reference: Path | None = None
    delta: float | None = None
    device: str = "cpu"
    elsewhere: ElsewhereHParams = field(default_factory=ElsewhereHParams)

    def __post_init__(self) -> None:
        refuse_missing_device(self.device)


@dataclass(frozen=True)
class Attacked:
    """A run whose model is attacked at a checkpoint, with weights rounded as in the run's evaluations."""

    run: Run
    hparams: AttackHParams
    state: State
    model: TrainableModel
    excluded = ()

    @classmethod
    def open(cls, path: Path, hparams: AttackHParams) -> "Attacked":
        """Open a run. Raises InputError for a wrong run, checkpoint or option, or a folder that cannot be written."""
        hparams.elsewhere.refuse_for(path)
        run = Run.open(path)
        refuse_unwritable(path, FOLDER)  # check this now, not after minutes
        state, model = attacked_model(run, hparams.round, hparams.device)
        return cls(run, hparams, state, model)

    @cached_property
    def claim(self) -> Claim | None:
        return claim_of(self.run, self.state, self.hparams.delta)

    @property
    def unit(self) -> str:
        return self.run.config.unit

    def targets(self) -> Targets:
        return targets_of(self.run, self.state.round, self.hparams.count)

    def before_both(
        self, records: Records, keys: Sequence[str], context: Records | None = None
    ) -> tuple[Candidates, Candidates]:
        """Return N records with N keys of random streams, with the attacked model, and with that before training."""
        run, reference, device = self.run, self.hparams.reference, self.hparams.device
        untrained = checkpoint.model_of(run.provenance).initialize(run.config.seed).to(torch.device(device))
        other = None if reference is None else _reference_model(run, reference, device)
        subject = run.corpus.vocabulary, unigram_of(run.corpus), run.config.seed, run.corpus.layout, other, context
        candidates = Candidates(self.model, records, keys, *subject)
        return candidates, candidates.before(as_measured(run, untrained))

    def stored(self, rows: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> Result:
        """Store rows in the run folder and return them with the columns of `SCHEMA`, and notes on the controls."""
        self.run.verify()  # measurements on other data must not be stored
        return store(self.run.path, self.run.identity, self.run.setting, self.state.round, rows, notes)


def store(
    path: Path, identity: str, setting: str, round: int, rows: Sequence[dict[str, Any]], notes: Sequence[str]
) -> Result:
    named = {"run": identity, "setting": setting, "round": round}
    table = pd.DataFrame([named | row for row in rows]).reindex(columns=list(SCHEMA.names))
    write_rows(path, round, table)
    return Result(frame=table, notes=(*_controls(table.iloc[0]), *notes))


def over_folders(runs: Sequence[Path | str], attack: Callable[[Path], Result]) -> pd.DataFrame:
    return pd.concat([attacked.frame for attacked in over_runs(runs, attack).values()], ignore_index=True)


def _controls(row: "pd.Series[Any]") -> Iterator[str]:
    """Yield sentences on the control that reads no model, and on the claim."""
    if pd.notna(row["control_auroc"]):
        verdict = (
            f"Above {CONFOUNDED:g}, no AUROC of this table shows memorization"
            if row["is_confounded"]
            else f"At most {CONFOUNDED:g}, so these two properties do not distinguish members"
        )
        yield f"Blind control: {row['control_auroc']:.3f} by length and word frequency only. {verdict}."
    if pd.notna(row["epsilon"]):
        yield (
            f"The ledger claims epsilon {row['epsilon']:.3g} at delta {row['delta']:.3g} for one {row['protects']} "
            f"({row['neighbours']})."
        )


def attacked_model(run: Run, round_: int | None, device: str) -> tuple[State, TrainableModel]:
    """Return the state after a round (by default the newest) and its model, with weights rounded as in evaluations."""
    name = "" if round_ is None else checkpoint.checkpoint_name(round_)
    path = run.path / "checkpoints" / name if name else newest_checkpoint(run.path)
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint; name another --round, or remove it to use the newest checkpoint")
    announce(run.config, "architecture")
    state, model = restored_model(run, path, device)
    return state, as_measured(run, model)


def as_measured(run: Run, model: TrainableModel) -> TrainableModel:
    bits = run.config.evaluation.weight_bits
    return model if bits is None else quantized(model, bits)


def _reference_model(run: Run, path: Path, device: str) -> TrainableModel:
    """Return the model of a checkpoint that read no record of the run's corpus."""
    if path == BASE:
        return base_of(run, device)
    if not path.is_file():
        raise InputError(f"--reference {path}: no such checkpoint")
    other = Run.open(path.resolve().parent.parent)
    why = ""
    if other.corpus.digest == run.corpus.digest:
        why = "this checkpoint was trained on the corpus of the run; name a checkpoint from another corpus"
    elif other.corpus.vocabulary.words != run.corpus.vocabulary.words or other.corpus.layout != run.corpus.layout:
        why = "the vocabulary of this checkpoint differs from that of the run; use one with the run's vocabulary"
    if why:
        raise InputError(f"--reference {path}: {why}")
    announce(other.config, "architecture")
    return restored_model(other, path, device)[1]
