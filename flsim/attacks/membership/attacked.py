"""A run under attack: the attacked model, further models, and stored rows of attacks in the run folder."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from flsim.algorithms import checkpoint
from flsim.attacks.audit.claim import Claim
from flsim.attacks.audit.subject import claim_of
from flsim.attacks.membership.candidates import Candidates
from flsim.attacks.membership.targets import Targets, targets_of, unigram_of
from flsim.attacks.result import Result
from flsim.base.errors import InputError
from flsim.base.files import held, new_file, refuse_unwritable
from flsim.base.machine import refuse_missing_device
from flsim.base.parquet import read_parquet
from flsim.base.settings import Count, settings
from flsim.data.records import Records
from flsim.models.language_model import TrainableModel
from flsim.models.quantization import quantized
from flsim.results.sweeps import over_runs
from flsim.runs.config.custom_code import announce
from flsim.runs.folder import Run
from flsim.runs.measuring import BASE, base_of, newest_checkpoint, restored_model
from flsim.training.update import State

# Rows of attacks on membership in a run folder: ``membership/round-000200.parquet``, a row per unit and attack.


FOLDER = "membership"
LOCK = ".attacking"  # lock file in the run folder, for reading and replacing rows
NAME = re.compile(r"round-(\d{6,})\.parquet", re.ASCII)
LEVELS = (0.001, 0.01, 0.1)  # false-positive rates
CURVE = ("curve_fpr", "curve_tpr", "curve_low", "curve_high", "curve_allowed")


def column(name: str, level: float) -> str:
    """Return the column of a value at a false-positive rate, such as ``tpr_at_0.001``."""
    return f"{name}_at_{level:g}"


SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("run", "setting", "unit", "attack", "kind")),
        *(pa.field(name, pa.int64(), nullable=False) for name in ("round", "n_in", "n_out")),
        *(pa.field(name, pa.float64(), nullable=False) for name in ("auroc", "auroc_low", "auroc_high", "confidence")),
        *((name, pa.float64()) for name in ("control_auroc", "untrained_auroc", "permuted_auroc")),
        ("is_confounded", pa.bool_()),
        *((name, pa.float64()) for name in ("epsilon", "delta")),
        *((name, pa.string()) for name in ("protects", "neighbours")),
        *(
            field
            for level in LEVELS
            for field in (
                (column("alarms", level), pa.int64()),
                *((column(name, level), pa.float64()) for name in ("tpr", "tpr_low", "tpr_high", "allowed")),
            )
        ),
        *((name, pa.list_(pa.float64())) for name in CURVE),
    ]
)


def write_rows(run_folder: Path, round_: int, table: pd.DataFrame) -> None:
    """Store rows of one run atomically, replacing rows of the same unit and attack; other rows of the round remain."""
    path = run_folder / FOLDER / f"round-{round_:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    lock = run_folder / LOCK
    lock.touch()
    with ExitStack() as stack:
        with suppress(OSError):  # a filesystem without locks
            # Without a lock, two commands could read the same rows, and the second would drop those of the first.
            stack.enter_context(held(lock, wait=True))
        if path.exists():
            earlier = read_rows(path, table["run"].iloc[0])
            asked = pd.MultiIndex.from_frame(table[["unit", "attack"]])
            others = earlier[~pd.MultiIndex.from_frame(earlier[["unit", "attack"]]).isin(asked)]
            table = pd.DataFrame([*others.to_dict("records"), *table.to_dict("records")])
        with new_file(path) as partial:
            stored = pa.Table.from_pandas(table, SCHEMA, preserve_index=False).replace_schema_metadata()
            pq.write_table(stored, partial)


def read_rows(path: Path, identity: str) -> pd.DataFrame:
    """Read a file of rows. Raises InputError if it is damaged, or has rows of another run."""
    rows = read_parquet(path, SCHEMA)
    if not (rows["run"] == identity).all():
        raise InputError(f"{path}: the file has rows of another run; move it away and attack again")
    return rows


def newest_rows(run_folder: Path, identity: str | None) -> pd.DataFrame:
    """Return the rows of the last round that was attacked; empty if there is none, or the run has no identity."""
    paths = [path for path in (run_folder / FOLDER).glob("*.parquet") if NAME.fullmatch(path.name)]
    newest = max(paths, key=lambda path: int(path.stem.removeprefix("round-")), default=None)
    return SCHEMA.empty_table().to_pandas() if newest is None or identity is None else read_rows(newest, identity)


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
