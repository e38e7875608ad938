"""Membership inference: the run under attack, its models and stored rows, and the attacks on its candidates.

A row is an estimate, whose intervals treat records (for the area, authors) as independent. It does not bound epsilon.
"""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from flsim.algorithms import checkpoint
from flsim.attacks.audit.audit import claim_of
from flsim.attacks.audit.bounds import of_group
from flsim.attacks.audit.claim import Claim
from flsim.attacks.membership.candidates import (
    BLIND,
    BY_DEFAULT,
    Attack,
    Candidates,
    Targets,
    attack_named,
    pairs_of,
    targets_of,
    unigram_of,
    unigram_over,
)
from flsim.attacks.result import Result
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError, RunFailed, as_list
from flsim.base.extensions import custom_call_errors, restrict_custom_code
from flsim.base.files import held, new_file, refuse_unwritable
from flsim.base.machine import refuse_missing_device
from flsim.base.parquet import read_parquet
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.settings import Count, settings
from flsim.base.statistics import auroc, auroc_interval, roc
from flsim.canaries.elsewhere import CanarySet, read_records
from flsim.data.corpus import Split
from flsim.data.records import Layout, Records
from flsim.data.tokenizer import TokenVocabulary
from flsim.models.language_model import TrainableModel, quantized, refusing_changes
from flsim.results.rows import MEASUREMENTS, read_run_file
from flsim.results.sweeps import over_runs
from flsim.runs.config.custom_code import announce
from flsim.runs.elsewhere import MeasuredModel, model_in
from flsim.runs.folder import Run, newest_checkpoint, other_model, restored_model
from flsim.training.update import State
from flsim.training.update import threads as threads_of_torch

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


# A run under attack: the attacked model and further models.

CLAIM = "The ledger claims epsilon {epsilon:.3g} at delta {delta:.3g} for one {protects} ({neighbours})."
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
        other = None if reference is None else other_model(run, reference, device, "--reference", _unfit_reference)
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
    claims = [CLAIM.format_map(row) for row in table[table["epsilon"].notna()].head(1).to_dict("records")]
    return Result(frame=table, notes=(*filter(None, notes), *claims))


def over_folders(runs: Sequence[Path | str], attack: Callable[[Path], Result]) -> pd.DataFrame:
    return pd.concat([attacked.frame for attacked in over_runs(runs, attack).values()], ignore_index=True)


def blind_control(area: float, low: float, members: int, others: int) -> tuple[dict[str, Any], str]:
    """Return the area of the control that reads no model, as values of a row, and a sentence on it.

    `low` is the lower end of its interval, and the numbers are those of the measured units. `is_confounded` is None if
    there are too few of them. An area that is NaN, from fewer than four units, has no sentence.
    """
    if math.isnan(area):
        return {"control_auroc": None, "is_confounded": None}, ""
    # the normal approximation of the Mann-Whitney statistic of equal distributions
    chance = 0.5 + 1.96 * math.sqrt((members + others + 1) / (12 * members * others))
    is_confounded: bool | None = area > max(CONFOUNDED, chance) and low > 0.5
    if is_confounded:
        verdict = f"Above {CONFOUNDED:g}: the texts differ, so no AUROC of this table shows memorization"
    elif max(chance, area) > CONFOUNDED:
        is_confounded = None
        verdict = (
            f"Undecided: with so few members and non-members, up to {max(chance, area):.3f} can be chance; attack more"
        )
    else:
        verdict = f"At most {CONFOUNDED:g}, so length and word frequency do not distinguish members"
    sentence = f"Blind control: {area:.3f} by length and word frequency only. {verdict}."
    return {"control_auroc": area, "is_confounded": is_confounded}, sentence


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


def _unfit_reference(run: Run, other: Run) -> str:
    """Return why models of `other` cannot be references for `run`; empty if they can."""
    if other.corpus.digest == run.corpus.digest:
        return "this checkpoint was trained on the corpus of the run; name a checkpoint from another corpus"
    if other.corpus.vocabulary.words != run.corpus.vocabulary.words or other.corpus.layout != run.corpus.layout:
        return "the vocabulary of this checkpoint differs from that of the run; use one with the run's vocabulary"
    return ""


# A model that was trained elsewhere under attack, with its canaries or with files of text as members.

WHITE_BOX = "gradient"  # attack that needs more than probabilities
MOST_TOKENS = 128  # of a record of a file; later tokens are not read
Side = tuple[Split, Ints]  # records of text, and the positions of those that are attacked


@dataclass(frozen=True, eq=False)
class TextSplit(Split):
    """Records of text with their names, each of one user."""

    keys: tuple[str, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        return list(self.keys)

    @classmethod
    def of(cls, name: str, texts: Sequence[Sequence[int]], layout: Layout, keys: Sequence[str]) -> "TextSplit":
        tokens = np.array([token for text in texts for token in text], layout.token_type)
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        return cls(layout, tokens, offsets, np.arange(len(texts) + 1), Path(name), None, tuple(keys))


def sides_of(canaries: CanarySet, model: TrainableModel, files: ElsewhereHParams) -> tuple[Side, Side]:
    """Return members and non-members: records of files without canaries; without files, canaries.

    Canaries without a copy are non-members.
    """
    layout, sides = replace(canaries.words.layout, record_words=MOST_TOKENS), list[Side]()
    if files.members is None or files.others is None:
        is_member = canaries.planting.insertions > 0
        for chosen in (is_member, ~is_member):
            listed = [canaries.planting.canaries[index] for index in np.flatnonzero(chosen)]
            keys = [canary.id for canary in listed]
            split = TextSplit.of("canaries", [canary.tokens for canary in listed], layout, keys)
            sides.append((split, np.arange(split.records)))
        return sides[0], sides[1]
    phrases = [canaries.text_of(canary)["text"].strip() for canary in canaries.planting.canaries]
    for path in (files.members, files.others):
        texts = [row["text"] for row in read_records(path, files.text)]
        keys = [f"{path.name}:{index}" for index in range(len(texts))]
        split = TextSplit.of(path.name, [_tokens(canaries, text, model) for text in texts], layout, keys)
        is_text = np.array([not any(phrase in text for phrase in phrases) for text in texts], np.bool_)
        sides.append((split, np.flatnonzero(is_text & (np.diff(split.record_offsets) > 0))))
    return sides[0], sides[1]


def _tokens(canaries: CanarySet, text: str, model: TrainableModel) -> list[int]:
    vocabulary = canaries.words.vocabulary
    if isinstance(vocabulary, TokenVocabulary):
        tokens = vocabulary.encode_text(text)
    else:
        tokens = vocabulary.encode(vocabulary.split(text))
    return tokens[: longest_record(model)]


def longest_record(model: TrainableModel) -> int:
    """Return the number of tokens of a record that are read; a model can have fewer positions than `MOST_TOKENS`."""
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None) or MOST_TOKENS
    return min(MOST_TOKENS, context - 1)


@dataclass(frozen=True)
class AttackedElsewhere:
    """A model that was trained elsewhere and is attacked, with the interface of `Attacked`."""

    measured: MeasuredModel
    hparams: AttackHParams
    sides: tuple[Side, Side]
    claim = None
    excluded = (WHITE_BOX,)

    @classmethod
    def open(cls, path: Path, hparams: AttackHParams) -> "AttackedElsewhere":
        refuse_unwritable(path, "membership")
        measured = MeasuredModel.open(path, hparams.round, hparams.elsewhere.model, hparams.device)
        return cls(measured, hparams, sides_of(measured.canaries, measured.model, hparams.elsewhere))

    @property
    def unit(self) -> str:
        return self.measured.canaries.unit

    def targets(self) -> Targets:
        members, others = self.sides
        return pairs_of(*members, [others], self.hparams.count, self.measured.canaries.seed, self.measured.path)

    def before_both(
        self, records: Records, keys: Sequence[str], context: Records | None = None
    ) -> tuple[Candidates, Candidates | None]:
        """Return the records with the model; and with the reference, if there is one, as the model before training."""
        canaries, path = self.measured.canaries, self.hparams.reference
        layout, reference = canaries.words.layout, None
        if path is not None:
            reference = model_in(path, canaries, self.measured.path).to(self.measured.model.device).eval()
        # A record of one word "can have been cut", so no end of a sequence is scored: such a model may have none.
        layout = replace(layout, record_words=1)
        unigram = unigram_over([split for split, _ in self.sides], layout)
        subject = canaries.words.vocabulary, unigram, canaries.seed, layout, reference, context
        candidates = Candidates(self.measured.model, records, keys, *subject)
        return candidates, None if reference is None else candidates.before(reference)

    def stored(self, rows: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> Result:
        described = read_run_file(self.measured.path)
        setting = described["label"]
        return store(self.measured.path, described["identity"], setting, self.measured.round, rows, notes)


# `flsim membership`: the attacks on a run, as rows.

CONFIDENCE = 0.95
POINTS = 60  # largest number of points of a stored curve


def infer_membership(
    *runs: Path | str,
    attacks: Sequence[str] = (),
    records: int = 1_000,
    round: int | None = None,
    reference: Path | str | None = None,
    delta: float | None = None,
    device: str = "cpu",
    elsewhere: ElsewhereHParams | None = None,
) -> pd.DataFrame:
    """Attack the membership of records like `flsim membership`, and store the rows in the run folders.

    Args:
        runs: run folders and folders of sweeps; or folders that hold some, such as the folder of a demo.
        attacks: names of built-in attacks, or ``path/to/file.py:NAME``; if empty, the built-in attacks that need no
            further model or text.
        records: largest number of members, and of non-members.
        round: round of the attacked checkpoint; the newest of each run if not given.
        reference: checkpoint of a run on another corpus with this vocabulary, or "base", for the attacks "reference",
            "ez" and "wbc"; by default "reference" compares with the frequency of single words.
        delta: delta of the claim for the rows; that of each run if not given.
        device: torch device, such as "cuda".
        elsewhere: settings for models that were trained elsewhere.

    Returns:
        A row per run and attack, with the columns of `flsim.attacks.membership.inference.SCHEMA`.

    Raises:
        InputError: there is no such run, checkpoint or attack; or no author is held out of training.

    Examples:
        >>> rows = flsim.infer_membership("runs/demo", attacks=["loss", "min-k++"])            # doctest: +SKIP
        >>> rows[["setting", "attack", "auroc", "control_auroc"]]                              # doctest: +SKIP
    """
    names = as_list("attacks", attacks)
    other, more = None if reference is None else Path(reference), elsewhere or ElsewhereHParams()
    hparams = AttackHParams(records, round, other, delta, device, more)
    return over_folders(runs, lambda path: attack_run(path, names, hparams))


@restrict_custom_code("architecture", "attack")
def attack_run(path: Path, attacks: Sequence[str], hparams: AttackHParams) -> Result:
    """Return the rows of `infer_membership` of one run, with notes; RunFailed or Diverged if a score is not finite."""
    with threads_of_torch(1):
        chosen = [attack_named(name) for name in dict.fromkeys(attacks or BY_DEFAULT)]
        kind: type[Attacked | AttackedElsewhere] = AttackedElsewhere if (path / MEASUREMENTS).is_file() else Attacked
        attacked = kind.open(path, hparams)
        for name in set(attacks) & set(attacked.excluded):
            raise InputError(f"--attack {name}: {path} has only the probabilities of its model; name another attack")
        chosen = [attack for attack in chosen if attack.name not in attacked.excluded]
        targets = attacked.targets()
        candidates, untrained = attacked.before_both(targets.records, targets.keys, targets.context)
        control = row_of(BLIND, candidates, targets)
        controls, verdict = blind_control(*(control[name] for name in ("auroc", "auroc_low", "n_in", "n_out")))
        rows = []
        for attack in tracked("attacking", chosen):
            row = row_of(attack, candidates, targets, attacked.claim, attacked.unit)
            before = None if untrained is None else _area(attack, untrained, targets)
            rows.append(row | controls | {"untrained_auroc": before})
    return attacked.stored(rows, [verdict, *targets.notes])


def row_of(
    attack: Attack, candidates: Candidates, targets: Targets, claim: Claim | None = None, protects: str = "user"
) -> dict[str, Any]:
    """Return the success of an attack as the values of a row by name, without those of the run and its controls."""
    scores, is_measured = scores_of(attack, candidates, targets)
    authors = np.array(targets.authors, object)[is_measured]
    is_member = targets.is_member[is_measured]
    return success(attack.name, "record", scores, is_member, authors, candidates.seed, claim, protects)


def success(
    name: str,
    unit: str,
    scores: Floats,
    is_member: Flags,
    authors: Sequence[str] | NDArray[Any],
    seed: int,
    claim: Claim | None = None,
    protects: str = "user",
    steps: int | None = None,
) -> dict[str, Any]:
    """Return how well scores [n] of units of n authors distinguish members from others, as values of a row by name.

    The claim, about units of the kind `protects`, covers a user of the scores in `steps` steps; None if it does not. A
    ledger of users covers the replacement of the data of a user, of which a record is a part.
    """
    if unit == "record" and claim is not None:
        steps = 1 if protects == "record" else claim.steps
    least = None if claim is None or steps is None else of_group(claim.curve.least_probability, steps)

    def allowed(fpr: float) -> float | None:
        return None if least is None else 1 - least(1 - fpr)

    authors = np.array(authors, object)
    members, others = scores[is_member], scores[~is_member]
    curve, keys = roc(members, others), (name,) if unit == "record" else (unit, name)
    units = authors[is_member].tolist(), authors[~is_member].tolist()
    low, high = auroc_interval(members, others, units, stream(seed, "membership bootstrap", *keys), CONFIDENCE)
    permuted = is_member[stream(seed, "permuted labels", *keys).permutation(len(is_member))]
    counts = np.unique(np.geomspace(1, len(others), POINTS).round().astype(np.int64))
    fprs = counts / len(others)
    points = [curve.at(fpr) for fpr in fprs]
    row = {
        "unit": unit,
        "attack": name,
        "kind": "estimate",
        "n_in": len(members),
        "n_out": len(others),
        "auroc": auroc(members, others),
        "auroc_low": low,
        "auroc_high": high,
        "confidence": CONFIDENCE,
        "permuted_auroc": auroc(scores[permuted], scores[~permuted]),
        "curve_fpr": fprs.tolist(),
        "curve_tpr": [point.tpr for point in points],
        "curve_low": [point.low for point in points],
        "curve_high": [point.high for point in points],
        "curve_allowed": [allowed(fpr) for fpr in fprs],
        "epsilon": claim and claim.epsilon,
        "delta": claim and claim.delta,
        "protects": claim and protects,
        "neighbours": claim and claim.convention.relation,
    }
    for level in LEVELS:
        at = curve.at(level) if level * len(others) >= 1 else None
        row |= {
            column("alarms", level): at and at.alarms,
            column("tpr", level): at and at.tpr,
            column("tpr_low", level): at and at.low,
            column("tpr_high", level): at and at.high,
            column("allowed", level): allowed(level),
        }
    return row


def scores_of(attack: Attack, candidates: Candidates, targets: Targets) -> tuple[Floats, Flags]:
    """Return the scores of the measured records, which with `fit` are one half of the pairs, and their mask [2N].

    Raises RunFailed, with the file, if a custom attack fails, changes a model, or does not return finite numbers.
    """
    count, models = len(candidates), [candidates.model, candidates.reference] if attack.source else []
    with refusing_changes(attack.source, models), custom_call_errors(attack.source, "score(candidates)"):
        computed = attack.score(candidates)
    if attack.fit is None:
        return _checked(attack, computed, count), np.ones(count, bool)
    statistics, pairs = _checked(attack, computed, count, columns=", F"), count // 2
    order = stream(candidates.seed, "membership halves").permutation(pairs)
    is_fit = order[targets.pairs] < pairs // 2
    if not is_fit.any():
        raise InputError(
            f'attack "{attack.name}" learns from half of the records, but there is only one pair; attack more records'
        )
    needs = "fit(statistics, is_member), which returns a function of statistics [n, F]"
    with custom_call_errors(attack.source, needs):
        scores = attack.fit(statistics[is_fit], targets.is_member[is_fit])(statistics[~is_fit])
    return _checked(attack, scores, int((~is_fit).sum())), ~is_fit


def _area(attack: Attack, candidates: Candidates, targets: Targets) -> float:
    scores, is_measured = scores_of(attack, candidates, targets)
    is_member = targets.is_member[is_measured]
    return auroc(scores[is_member], scores[~is_member])


def _checked(attack: Attack, values: Any, count: int, columns: str = "") -> Floats:
    """Return values of records as float64 [count, with columns]; RunFailed if the form differs or one is not finite."""
    with suppress(TypeError, ValueError):
        numbers = np.asarray(values, np.float64)
        if numbers.ndim == 1 + bool(columns) and len(numbers) == count and np.isfinite(numbers).all():
            return numbers
    raise RunFailed(
        f"{attack.source or f'attack {attack.name}'}: did not return a finite number for each of {count} records; "
        f"return float64 [{count}{columns}]"
    )
