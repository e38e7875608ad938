"""Sanitization, which drops train records that look like secrets: Carlini et al. (2018), "The Secret Sharer".

Appendix F: the records are split at random in two even halves and a model is trained on each. A record that only one
model has memorized is far more likely under that model: its log-perplexity difference |L_F(x) - L_G(x)| is large. The
share of records with the largest difference is dropped. The method is for secrets that occur once, because copies in
both halves hide each other. The text of the paper has "the top 10% samples with the smallest" difference, but its
algorithm has the largest.
"""

from dataclasses import asdict, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import Diverged, InputError
from flsim.base.extensions import is_custom, parts, source_digest
from flsim.base.progress import progress
from flsim.base.rng import stream
from flsim.base.settings import Level, settings
from flsim.data.corpus import Corpus
from flsim.data.records import Batch, RecordSource, Subset, batch
from flsim.defences.dropping import drop_records, train_records
from flsim.models.architectures import restore
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import TrainableModel, predictions
from flsim.training.central import CentralHParams, CentralTraining, init, train_central

BLOCK = 2**13  # records that are sorted by length together
CPU_LOGITS, GPU_LOGITS = 2**22, 2**26  # largest number of logits in one batch


@settings
class SanitizationHParams:
    """Settings of the dropped share, and of the two models.

    Attributes:
        share: share of the train records to drop.
        model: sizes of both models.
        training: training of both models.
    """

    share: Level = 0.1
    model: ModelHParams = field(default_factory=ModelHParams)
    training: CentralHParams = field(default_factory=CentralHParams)

    @property
    def label(self) -> str:
        """Return the name of this defence in a table of runs."""
        return f"sanitized {self.share:.0%}"


def sanitize(corpus: Corpus, out: Path, hparams: SanitizationHParams, seed: int, device: str = "cpu") -> Corpus:
    """Write the corpus without the share of train records whose log-perplexity difference is largest; or Diverged."""
    train = train_records(corpus, out, at_least=2)
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but torch finds no GPU; use cpu")
    differences = log_perplexity_differences(train, hparams, seed, device)
    remains = ~largest(differences, max(1, min(round(hparams.share * train.records), train.records - 1)))
    dropped = {"records_sanitized": int(np.count_nonzero(~remains))}
    step = {"step": "sanitize", "label": hparams.label, "seed": seed, **asdict(hparams)}
    for setting in ("optimizer", "schedule"):
        if is_custom(name := step["training"][setting]):  # the manifest names custom code by content, not by folder
            step["training"][setting] = f"{source_digest(name)}.py:{parts(name)[1]}"
    return drop_records(corpus, out, remains, step, dropped)


def halves(records: int, seed: int) -> tuple[Ints, Ints]:
    """Draw a split of `records` positions in two halves, ascending; the second has one more if the number is odd."""
    order = stream(seed, "sanitization halves").permutation(records)
    return np.sort(order[: records // 2]), np.sort(order[records // 2 :])


def log_perplexity_differences(
    source: RecordSource, hparams: SanitizationHParams, seed: int, device: str = "cpu"
) -> Floats:
    """Return |L_F(x) - L_G(x)| of every record, nats [records], of models that start from the same weights."""
    first, second = (
        _trained(Subset(source, half), hparams, seed, device, f"training on half {number} of 2")
        for number, half in enumerate(halves(source.records, seed), start=1)
    )
    differences = np.empty(source.records)
    with progress("scoring records", source.records, unit="records") as advance:
        for begin in range(0, source.records, BLOCK):
            positions = np.arange(begin, min(begin + BLOCK, source.records))
            scores = record_log_perplexities((first, second), source, positions)
            differences[positions] = np.abs(scores[0] - scores[1])
            advance(positions[-1].item() + 1)
    return differences


def record_log_perplexities(models: tuple[TrainableModel, ...], source: RecordSource, positions: Ints) -> Floats:
    """Return L(x) = -log Pr(x) after BOS, with EOS if the record has it, nats [models, n]; or raise Diverged."""
    layout, device = source.layout, models[0].device
    records = source.records_at(positions)
    order = np.argsort(-np.diff(records.offsets), kind="stable")  # records of similar length need little padding
    budget = max(1, (CPU_LOGITS if device.type == "cpu" else GPU_LOGITS) // layout.vocabulary_size)
    scores, first = np.empty((len(models), len(positions))), 0
    while first < len(order):
        longest = int(np.diff(records.offsets)[order[first]]) + 1
        chosen = order[first : first + max(1, budget // longest)]
        part = batch(records, chosen, layout)
        for number, model in enumerate(models):
            scores[number, chosen] = _row_sums(model, part, device, layout.pad)
        first += len(chosen)
    if not np.isfinite(scores).all():
        raise Diverged("a log-perplexity is not finite; most likely the learning rate is too high")
    return scores


def largest(values: Floats, count: int) -> Flags:
    """Return whether a value is among the `count` >= 1 largest, bool [n]; among equal values, the first ones."""
    chosen = np.zeros(len(values), bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def _trained(half: Subset, hparams: SanitizationHParams, seed: int, device: str, title: str) -> TrainableModel:
    training = CentralTraining(half, hparams.training, seed, device=device, model=hparams.model)
    state, steps = init(half.layout.vocabulary_size, hparams.model, seed), hparams.training.steps_over(half.records)
    *_, (trained, _) = train_central(state, training, steps, title=title)
    return restore(trained.params, hparams.model, half.layout.vocabulary_size).to(device)


def _row_sums(model: TrainableModel, part: Batch, device: torch.device, pad: int) -> Floats:
    inputs, targets = torch.from_numpy(part.inputs).to(device), torch.from_numpy(part.targets).to(device)
    _, nats, _ = predictions(model, inputs, targets, pad)
    rows = (targets != pad).nonzero()[:, 0]
    sums: Tensor = torch.zeros(len(targets), dtype=torch.float64, device=device).index_add_(0, rows, nats.double())
    return sums.cpu().numpy()
