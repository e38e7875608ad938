"""Folders of measurements of a model that was trained elsewhere, which tables, plots and audits read like runs.

measurements.toml  training.kind = "elsewhere", the model's name, the law of its canaries, settings of the evaluation
planted/           roster.parquet (flsim.canaries.population); with a law, all files of flsim.canaries.elsewhere
models/            round-000010.json, ...: how to load the model of a round, with digests of its code and parameters
rows/              round-000010.parquet, ...: measurements, by the round of the checkpoint
run.json           as in a run folder, with digests of measurements.toml and of the canaries
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from flsim.base.errors import InputError, RunFailed, in_one_line
from flsim.base.files import (
    digest,
    file_digest,
    from_json,
    inside,
    make_folder,
    new_folder,
    refuse_unwritable,
    remove_abandoned,
    write_json,
)
from flsim.base.progress import say
from flsim.canaries.elsewhere import MANIFEST, CanarySet, Unit
from flsim.canaries.planting import Overlay, Planting
from flsim.canaries.population import write_roster
from flsim.canaries.spec import Canary
from flsim.data.records import TOKENIZER, Layout, Users, Vocabulary
from flsim.data.tokenizer import TABLE
from flsim.models.language_model import TrainableModel
from flsim.results.rows import FILE, MEASUREMENTS, Row, identity_of, is_run, read_run_file, read_settings, write_rows
from flsim.runs import loading
from flsim.runs.evaluate import Checked, EvaluationHParams, audit, own_quantities, refuse_inconsistent

MODELS = "models"
LISTED = "listed"  # the source of canaries whose law is unknown


@dataclass(frozen=True)
class CanariesElsewhere:
    """Canaries of a model that was trained elsewhere, and the facts that are known about them."""

    planting: Planting  # the canaries, with their numbers of sharers and copies
    vocabulary: Vocabulary  # the words
    layout: Layout  # the layout of token ids
    law: dict[str, Any]  # the settings of the draw, by name; only `source` if they are unknown
    unit: Unit  # the unit of sharers
    identity: str  # digest of these attributes
    prefix: int = 1  # number of words that an attacker knows, unless an evaluation sets another number
    seed: int = 0  # seed of the draws, and of references unless an evaluation sets another seed
    # file with the id of a Hugging Face model for each token id; None if words are not tokens of a model
    tokens: Path | None = None
    drawn: CanarySet | None = None  # the canaries with their law; None if somebody listed them
    are_of_model: bool = False  # whether a Hugging Face model has these token ids, or those of `tokens`

    @classmethod
    def of_folder(cls, drawn: CanarySet, folder: Path) -> "CanariesElsewhere":
        law = {name: value for name, value in asdict(drawn.hparams).items() if value not in (None, ())}
        tokens = folder / TABLE if drawn.words.layout.name == TOKENIZER else None
        facts = drawn.unit, drawn.identity, drawn.prefix, drawn.seed, tokens, drawn, tokens is not None
        return cls(drawn.planting, drawn.words.vocabulary, drawn.words.layout, law, *facts)

    @classmethod
    def listed(cls, canaries: tuple[Canary, ...], vocabulary: Vocabulary | None, layout: Layout) -> "CanariesElsewhere":
        copies = np.array([canary.copies or 0 for canary in canaries], np.int64)
        nothing = Overlay(np.empty(0, np.int64), np.empty(0, np.uint16))
        words = vocabulary or Vocabulary(tuple(map(str, range(layout.words))), (0,) * layout.words, layout.name)
        identity = digest(repr(canaries), repr(layout))
        planting = Planting(canaries, nothing, copies, copies, copies, copies)
        return cls(planting, words, layout, {"source": LISTED}, "record", identity)

    @property
    def controls(self) -> list[Canary]:
        copies = zip(self.planting.canaries, self.planting.insertions, strict=True)
        is_listed = self.drawn is None
        return [one for one, count in copies if count == 0 and not (is_listed and one.copies is None)]


@dataclass(frozen=True)
class Measurements:
    path: Path  # the folder
    label: str  # name of the model in tables
    canaries: CanariesElsewhere  # the canaries
    hparams: EvaluationHParams  # settings of the evaluation
    seed: int  # seed of references and of the choice of test users

    @cached_property
    def settings(self) -> dict[str, Any]:
        evaluation = {name: value for name, value in asdict(self.hparams).items() if value is not None}
        canaries = {**self.canaries.law, "unit": self.canaries.unit}
        training = {"kind": "elsewhere", "name": self.label}
        return {"seed": self.seed, "training": training, "canaries": canaries, "evaluation": evaluation}

    @cached_property
    def _digest(self) -> str:
        return digest(json.dumps(self.settings, sort_keys=True))

    @property
    def identity(self) -> str:
        """Return the name in rows."""
        return identity_of(self._digest, self.canaries.identity)

    def refuse_other(self) -> None:
        """Raise InputError if rows cannot be stored, or a number of copies is unknown, before anything is measured."""
        unknown = [canary.id for canary in self.canaries.planting.canaries if canary.copies is None]
        if unknown and self.canaries.law["source"] == LISTED:
            raise InputError(
                f"canary {unknown[0]}: its number of copies in the training data is unknown; add the column copies, 0 "
                f"for a control, or remove --out"
            )
        if not self.path.exists():
            refuse_unwritable(next(folder for folder in self.path.absolute().parents if folder.exists()))
            return
        if not (self.path / MEASUREMENTS).is_file():
            raise InputError(f"{self.path}: exists, and has no measurements of a model; name another folder")
        name = read_settings(self.path).get("training.name", self.label)
        if name != self.label:
            raise InputError(f"{self.path}: has measurements of {name}, not of {self.label}; add --name {name!r}")
        if read_run_file(self.path)["identity"] != self.identity:
            raise InputError(
                f"{self.path}: has measurements of other canaries or with other settings; name another folder"
            )
        refuse_unwritable(self.path, "rows")

    def add(self, round: int, rows: Sequence[Row], model: Mapping[str, Any], last: int) -> None:
        """Store a round's rows and how to load its model; InputError as `refuse_other`, or for another model.

        The folder is incomplete until the round is `last`.
        """
        self.refuse_other()
        stored = self.path / MODELS / f"round-{round:06d}.json"
        if stored.exists() and from_json(stored.read_bytes())["digest"] != model["digest"]:
            raise InputError(f"{self.path}: has round {round} of another model; name another folder or --round")
        status, is_new = "completed" if round == last else "running", not is_run(self.path)
        newest = round if is_new else max(round, read_run_file(self.path)["round"])
        with new_folder(self.path) if is_new else nullcontext(self.path) as folder:
            if not is_new:
                self.describe(folder, newest, last, "running")
            else:
                (folder / MEASUREMENTS).write_text(tomli_w.dumps(self.settings), encoding="utf-8")
                if self.canaries.drawn is None:
                    (folder / "planted").mkdir()
                    write_roster(folder / "planted", self.canaries.planting, self.canaries.vocabulary)
                else:
                    self.canaries.drawn.write(folder / "planted")
            write_rows(folder, round, rows, own_quantities(self.hparams.also))
            make_folder(folder / MODELS)
            write_json(folder / MODELS / stored.name, dict(model))
            self.describe(folder, newest, last, status)

    def describe(self, folder: Path, newest: int, last: int, status: str, reason: str | None = None) -> None:
        """Write run.json."""
        without_seed = {name: value for name, value in self.settings.items() if name != "seed"}
        facts = {
            "name": self.path.resolve().name,
            "config": self._digest,
            "corpus": self.canaries.identity,
            "setting": self.label,
            "partition": None,
            "label": self.label,
            "status": status,
            "reason": reason,
            "round": newest,
            "rounds": max(newest, last),
            "seed": self.seed,
            "series": digest(json.dumps(without_seed, sort_keys=True)),
        }
        write_json(folder / "run.json", facts)


@dataclass(frozen=True)
class OtherModel:
    # factory of the model, whose code is executed; see `flsim.runs.loading.load_other`. Or a folder of
    # transformers or peft, or a folder of such folders, whose names have the rounds.
    spec: str
    arguments: Mapping[str, Any]  # arguments of the factory
    state: Path | None = None  # a file with weights, or a folder of such files; None if the factory loads weights
    context: int | None = None  # number of tokens that a module without `start` and `step` reads
    round: int | None = None  # the round, if no name has it

    @cached_property
    def folder(self) -> Path | None:
        """Return the folder of the model; None if a factory makes it."""
        if not Path(self.spec).is_dir():
            return None
        if self.state is not None or self.arguments or self.context is not None:
            raise InputError(f"--model {self.spec}: a folder has its weights and settings; remove --state and --set")
        return Path(self.spec)

    @property
    def label(self) -> str:
        """Return a name for tables: of the folder, or of the factory with its arguments."""
        if self.folder is not None:
            return self.folder.resolve().name
        options = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return self.spec.rpartition(":")[2] + (f"({options})" if options else "")

    @cached_property
    def checkpoints(self) -> list[tuple[int, Path | None]]:
        """Return the rounds, ascending, and the files or folders of their weights."""
        if self.round is not None and self.round < 0:
            raise InputError(f"--round {self.round}: rounds are 0 or more")
        if self.folder is not None and loading.is_folder_of_model(self.folder):
            return [(self.round or 0, self.folder)]
        several = self.state if self.folder is None else self.folder
        return [(self.round or 0, None)] if several is None else [*loading.checkpoints_in(several, self.round)]

    def load(self, weights: Path | None, canaries: CanariesElsewhere) -> Any:
        if self.folder is None or weights is None:
            make = partial(loading.load_other, self.spec, self.arguments, weights, self.context, "--model ")
            state = torch.get_rng_state()
            model = make()
            if weights is None and not torch.equal(state, torch.get_rng_state()):
                first = loading.weights_digest(model)
                del model  # memory may have room for one model only
                model = make()
                if loading.weights_digest(model) != first:
                    say(
                        f"warning: --model {self.spec}: two calls of the function make different weights, so they may "
                        "be random; load trained weights in the function, or name them with --state"
                    )
            return model
        if not canaries.are_of_model:
            raise InputError(
                f"--model {self.spec}: canaries have words, but the model has tokens; draw canaries with flsim data "
                f"canaries --tokenizer {self.spec}, name a --corpus with its tokens, or wrap the model in a function"
            )
        return loading.load_folder(weights, canaries.layout.vocabulary_size, canaries.tokens)

    def record(self, weights: Path | None, model: Any) -> dict[str, Any]:
        """Return how to load the model of a checkpoint again, with digests of its code and of its parameters."""
        entry = {
            "weights": None if weights is None else str(weights.resolve()),
            "digest": loading.weights_digest(model),
        }
        if self.folder is not None:
            return entry
        file, (where, _, name) = loading.code_file(self.spec), self.spec.rpartition(":")
        factory = f"{file}:{name}" if where.endswith(".py") or "/" in where else self.spec
        arguments = {"arguments": dict(self.arguments), "context": self.context}
        return entry | {"factory": factory, "code": loading.code_digests(file)} | arguments


def measure(
    model: OtherModel,
    canaries: CanariesElsewhere,
    hparams: EvaluationHParams,
    seed: int,
    device: str = "cpu",
    test: Users | None = None,
    out: Path | None = None,
    name: str | None = None,
) -> list[Row]:
    """Measure each checkpoint of a model as `flsim.runs.evaluate.audit` does; store the rows if `out` is set.

    Raises InputError for a wrong checkpoint or factory, a model against the protocol, or another `out`.
    """
    folder = None if out is None else Measurements(out, name or model.label, canaries, hparams, seed)
    if folder is not None:
        folder.refuse_other()
        remove_abandoned(folder.path)
    run = model.spec if folder is None else folder.identity
    rows, last = [], model.checkpoints[-1][0]
    try:
        for round_, weights in model.checkpoints:
            loaded = model.load(weights, canaries)
            where = model.spec if weights is None else str(weights)
            planted, on = canaries.planting.canaries, torch.device(device)
            of_round = audit(loaded, planted, canaries.layout, hparams, seed, where, on, test, run, round_)
            if folder is not None:
                folder.add(round_, of_round, model.record(weights, loaded), last)
            rows += of_round
    except (InputError, RunFailed) as error:
        if folder is not None and rows:
            newest = read_run_file(folder.path)["round"]
            folder.describe(folder.path, newest, last, "failed", in_one_line(error))
        raise
    return rows


def canaries_of(path: Path) -> CanarySet:
    """Return the canaries of measurements, drawn again from their law; InputError if others were measured or listed."""
    if not (path / "planted" / MANIFEST).is_file():
        raise InputError(
            f"{path}: has no law of its canaries, so nothing can be proven; draw canaries with flsim data canaries "
            "before training, and measure the model with them"
        )
    canary_set = CanarySet.read(path / "planted")
    if canary_set.identity != from_json((path / FILE).read_text(encoding="utf-8")).get("corpus"):
        raise InputError(f"{path}: its canaries are not those that were measured; measure the model again")
    return canary_set


def model_in(folder: Path, canaries: CanarySet, path: Path) -> TrainableModel:
    """Return the model in a folder of transformers or peft, for measurements at `path`; InputError for other tokens."""
    if not loading.is_folder_of_model(folder):
        raise InputError(f"{folder}: has no model of transformers or peft; name the folder of a model")
    table = path / "planted" / TABLE
    return loading.load_folder(folder, canaries.words.layout.vocabulary_size, table if table.is_file() else None)


@dataclass(frozen=True)
class MeasuredModel:
    path: Path  # the folder
    round: int  # the round
    canaries: CanarySet  # the canaries, with their law
    model: TrainableModel  # the model, with the parameters that were measured

    @classmethod
    def open(
        cls, path: Path, round: int | None = None, spec: str | None = None, device: str = "cpu"
    ) -> "MeasuredModel":
        """Load the model of a round, by default of the newest one, and compare it with the measured one.

        Only the user decides what is executed, with `spec`, which names the factory, or a folder that was moved.
        InputError if the model is unknown, its factory is not named, or code or parameters are not those measured.
        """
        canaries, record, number = canaries_of(path), *_record_of(path, round)
        weights = None if record["weights"] is None else Path(record["weights"])
        if "factory" in record:
            loaded = _made_again(path, record, weights, spec)
        else:
            loaded = model_in(Path(str(weights if spec is None else spec)), canaries, path)
        if loading.weights_digest(loaded) != record["digest"]:
            raise InputError(
                f"{weights or spec}: not the parameters that {path} measured; restore them, or measure the model again"
            )
        if isinstance(loaded, TrainableModel):
            return cls(path, number, canaries, loaded.to(torch.device(device)).eval())
        checked = Checked(loaded, canaries.words.layout, str(spec), torch.device(device))
        refuse_inconsistent(checked)
        return cls(path, number, canaries, checked)


def _record_of(path: Path, round: int | None) -> tuple[dict[str, Any], int]:
    known = {int(file.stem[6:]): file for file in (path / MODELS).glob("round-*.json") if file.stem[6:].isdecimal()}
    if round is not None and known and round not in known:
        raise InputError(
            f"{path}: has no model of round {round}; measured rounds are {', '.join(map(str, sorted(known)))}"
        )
    if not known:
        raise InputError(f"{path}: does not name its model; measure it again with flsim evaluate --model --out")
    file = known[max(known) if round is None else round]
    try:
        record = from_json(file.read_text(encoding="utf-8"))
        text, number = str | None, int | None
        types: dict[str, Any] = {"weights": text, "digest": text, "factory": str, "code": dict, "arguments": dict}
        types["context"] = number
        if not all(isinstance(record[name], types[name]) for name in {"weights", "digest", *record}):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: does not describe a model; measure the model again") from error
    return record, int(file.stem[6:])


def _made_again(path: Path, record: Mapping[str, Any], weights: Path | None, spec: str | None) -> Any:
    """Return the model of the factory that the user names, if its code is the code that was measured."""
    if spec is None:
        named = record["factory"] if record["factory"].isprintable() else repr(record["factory"])
        raise InputError(
            f"{path}: code makes its model, and flsim executes only code that you name; if you trust it, add --model "
            f"{named}"
        )
    folder = loading.code_file(spec, "--model ").parent
    for name, content in record["code"].items():
        file = inside(folder, name)
        if not file.is_file() or file_digest(file) != content:
            raise InputError(
                f"--model {spec}: {file} is not the code that {path} measured; restore it, or measure again"
            )
    if weights is not None and not weights.exists():
        raise InputError(f"{weights}: no such file of weights; restore it, or measure the model again")
    return loading.load_other(spec, record["arguments"], weights, record["context"], "--model ")
