"""A model that was trained elsewhere under attack, with its canaries or with files of text as members."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flsim.attacks.membership.attacked import Attacked, AttackHParams, ElsewhereHParams, store
from flsim.attacks.membership.candidates import Candidates
from flsim.attacks.membership.targets import Targets, pairs_of, unigram_over, unseen
from flsim.attacks.result import Result
from flsim.base.arrays import Ints
from flsim.base.files import refuse_unwritable
from flsim.canaries.elsewhere import CanarySet
from flsim.canaries.preflight import read_records
from flsim.data.corpus import Split
from flsim.data.records import Records
from flsim.data.tokenizer import TokenVocabulary
from flsim.data.vocabulary import Layout
from flsim.models.language_model import TrainableModel
from flsim.results.run_file import MEASUREMENTS, read_run_file
from flsim.runs.elsewhere import MeasuredModel, model_in

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

    Canaries without a copy are non-members. Non-members whose text is also a training record are excluded.
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
    (train, members), (held_out, others) = sides
    return (train, members), (held_out, unseen(held_out, others, train))


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


def open_attacked(path: Path, hparams: AttackHParams) -> Attacked | AttackedElsewhere:
    if (path / MEASUREMENTS).is_file():
        return AttackedElsewhere.open(path, hparams)
    return Attacked.open(path, hparams)
