"""Defences that change a corpus: deduplication, and sanitization of personal data."""

from dataclasses import asdict, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray
from torch import Tensor

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import Diverged, InputError
from flsim.base.extensions import is_custom, parts, source_digest
from flsim.base.files import refuse_existing
from flsim.base.progress import progress
from flsim.base.rng import stream
from flsim.base.settings import Count, Level, Probability, settings
from flsim.canaries.population import PlantedCorpus
from flsim.data.corpus import Corpus, Split, blocks, rewrite_corpus
from flsim.data.records import Batch, RecordSource, Subset, Tokens, batch
from flsim.models.architectures import ModelHParams, restore
from flsim.models.language_model import TrainableModel, predictions
from flsim.training.central import CentralHParams, CentralTraining, init, train_central


def train_records(corpus: Corpus, out: Path, at_least: int = 1) -> Split:
    """Return the train split; raise InputError if it has fewer than `at_least` records, or `out` exists."""
    refuse_existing(out)
    train = corpus.split("train")
    if train.records < at_least:
        raise InputError(
            f"{corpus.path}: has {train.records} train records, but needs {at_least}; import a larger corpus"
        )
    return train


def drop_records(
    corpus: Corpus, out: Path, kept: NDArray[np.bool_], step: dict[str, Any], dropped: dict[str, int]
) -> Corpus:
    """Write the corpus with only the `kept` train records [records], the defence as a step, and counts by reason."""
    before = PlantedCorpus.read(corpus)
    if before is None:
        return rewrite_corpus(corpus, out, step, kept=kept, dropped=dropped)
    after = before.select(kept, np.asarray(corpus.split("train").user_offsets))
    counts = {
        "copies_before": before.copies,
        "copies": after.copies,
        "canaries_before": before.present,
        "canaries": after.present,
    }
    return rewrite_corpus(
        corpus,
        out,
        {**step, "planted": counts},
        kept=kept,
        dropped=dropped,
        notes=[
            f"{step['step']}: kept {after.copies:,} of {before.copies:,} canary copies, {after.present:,} of "
            f"{before.present:,} canaries"
        ],
        write_more=lambda folder: after.write(folder, corpus.vocabulary),
    )


# Near duplicates: records whose sets of word n-grams are similar.
#  MinHash with locality-sensitive hashing (datasketch) finds candidates among the kept records. Their Jaccard
# similarity is then computed exactly. Therefore no record is dropped wrongly, and one in `MISSES` near duplicates can
# be missed.

PERMUTATIONS = 64
MISSES = 1_000
_GRAM = np.uint64(0x9E3779B97F4A7C15)  # odd; mixes the words of an n-gram
Grams = frozenset[tuple[int, ...]]


def first_of_near(split: Split, chosen: Flags, near: float, ngram: int, by_user: bool) -> Flags:
    """Return whether a chosen record [records] is similar to no earlier kept record; others are dropped [records].

    `near` is the smallest Jaccard similarity of equal records. This is a Python loop over some thousands of records per
    second, and needs about 6 kB of memory for each kept record.
    """
    is_first = chosen.copy()
    empty, bands = MinHash(PERMUTATIONS, hashfunc=int), bands_for(near)
    index = MinHashLSH(num_perm=PERMUTATIONS, params=bands)
    user_offsets = np.asarray(split.user_offsets)
    with progress("comparing n-grams", split.records, unit="records") as advance:
        for first, last in blocks(user_offsets, 1 if by_user else None):
            if by_user:
                index = MinHashLSH(num_perm=PERMUTATIONS, params=bands)
            begin, end = user_offsets[first].item(), user_offsets[last].item()
            positions = begin + np.flatnonzero(chosen[begin:end])
            for record, words in zip(positions.tolist(), split.records_at(positions), strict=True):
                sketch = empty.copy()
                sketch.update_batch(_hashed(words, ngram).tolist())
                candidates = index.query(sketch)
                grams = grams_of(words, ngram) if candidates else frozenset()
                of_others = (grams_of(_words(split, other), ngram) for other in candidates)
                if any(len(grams & other) / len(grams | other) >= near for other in of_others):
                    is_first[record] = False
                else:
                    index.insert(record, sketch, check_duplication=False)
                advance(record)
            advance(end)
    return is_first


def bands_for(near: float) -> tuple[int, int]:
    """Return bands b and rows r, with the most rows at which one in `MISSES` similar records shares no band.

    Two records of similarity s agree in a band with probability s^r, in none with (1 - s^r)^b.
    """
    rows = PERMUTATIONS // 2
    while rows > 1 and (1 - near**rows) ** (PERMUTATIONS // rows) > 1 / MISSES:
        rows -= 1
    return PERMUTATIONS // rows, rows


def grams_of(words: Tokens, ngram: int) -> Grams:
    """Return the n-grams of a record; all its words as one n-gram if it is shorter."""
    listed = words.tolist()
    return frozenset(tuple(listed[start : start + ngram]) for start in range(max(1, len(listed) - ngram + 1)))


def _words(split: Split, record: int) -> Tokens:
    start, end = split.record_offsets[record : record + 2].tolist()
    return np.asarray(split.tokens[start:end])


def _hashed(words: Tokens, ngram: int) -> NDArray[np.uint64]:
    """Return a 32-bit hash of each n-gram."""
    size = min(ngram, len(words))
    hashes = np.zeros(len(words) - size + 1, np.uint64)
    for place in range(size):
        hashes = (hashes + words[place : place + len(hashes)] + np.uint64(1)) * _GRAM
        hashes ^= hashes >> np.uint64(29)
    return hashes >> np.uint64(32)


# Deduplication of train records: the first record of each text in the order of the corpus remains.
#
# Lee et al., "Deduplicating Training Data Makes Language Models Better" (2022): exact repetitions, and near repetitions
# with MinHash (Broder, 1997). Records are sentences, so near repetitions are compared by n-grams of two words instead
# of five.

Within = Literal["corpus", "user"]


@settings
class DeduplicationHParams:
    """Settings of what counts as a repeated record.

    Attributes:
        near: smallest Jaccard similarity of sets of word n-grams at which two records count as equal; None for exact
            equality only.
        within: "corpus" compares records of all users, and "user" records of one user.
        ngram: n; a record of fewer words is one n-gram.
    """

    near: Probability | None = None
    within: Within = "corpus"
    ngram: Count = 2

    @property
    def label(self) -> str:
        """Return the name of this defence in a table of runs."""
        return "deduplicated" if self.near is None else f"deduplicated at {self.near:g}"


def deduplicate(corpus: Corpus, out: Path, hparams: DeduplicationHParams) -> Corpus:
    """Write the corpus without repeated train records, of which there must be any; `out` must not exist."""
    train = train_records(corpus, out)
    remains = first_of_equal(train, hparams.within)
    dropped = {"records_duplicated": int(np.count_nonzero(~remains))}
    if hparams.near is not None:
        distinct = remains
        remains = first_of_near(train, distinct, hparams.near, hparams.ngram, hparams.within == "user")
        dropped["records_near_duplicated"] = int(np.count_nonzero(distinct & ~remains))
    return drop_records(
        corpus, out, remains, {"step": "deduplicate", "label": hparams.label, **asdict(hparams)}, dropped
    )


def first_of_equal(split: Split, within: Within = "corpus") -> Flags:
    """Return whether no earlier record has the same words, bool [records].

    Records are compared by hashes of 128 bits, so two different records among 10^9 are equal with a probability below
    10^-20. This is a Python loop over some 300,000 records per second, and needs about 60 bytes of memory per record.
    """
    hashes, user_offsets = bytearray(), np.asarray(split.user_offsets)
    with progress("comparing records", split.records, unit="records") as advance:
        for first, last in blocks(user_offsets, 1 if within == "user" else None):
            key = str(first).encode() if within == "user" else b""
            begin, end = user_offsets[first].item(), user_offsets[last].item()
            for record in split.records_at(np.arange(begin, end)):
                hashes += blake2b(record.tobytes(), digest_size=16, key=key).digest()
            advance(end)
    is_first = np.zeros(split.records, bool)
    is_first[np.unique(np.frombuffer(hashes, "S16"), return_index=True)[1]] = True
    return is_first


# Sanitization, which drops train records that look like secrets: Carlini et al. (2018), "The Secret Sharer".
#
# Appendix F: the records are split at random in two even halves and a model is trained on each. A record that only one
# model has memorized is far more likely under that model: its log-perplexity difference |L_F(x) - L_G(x)| is large. The
# share of records with the largest difference is dropped. The method is for secrets that occur once, because copies in
# both halves hide each other. The text of the paper has "the top 10% samples with the smallest" difference, but its
# algorithm has the largest.

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
        return f"sanitized {100 * self.share:g}%"


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
