"""`flsim extract`: strings, their extraction from models of runs, and their rates next to text outside training."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, inf, prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from flsim.attacks.membership.candidates import matched, members_of, never_trained
from flsim.attacks.membership.inference import ElsewhereHParams, attacked_model, sides_of
from flsim.attacks.result import Result, over_seeds, refuse_unlike
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError, as_list
from flsim.base.extensions import restrict_custom_code
from flsim.base.machine import refuse_missing_device
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.settings import DIFFERENT, Count, Natural, Positive, Probability, settings
from flsim.base.statistics import difference_interval, share_interval
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.corpus import Split
from flsim.data.records import Layout, Records, batch, batches_by_length
from flsim.data.sentences import NGrams
from flsim.measures.memorization.score import Template, cheapest, floats_at_once, nats, rows_at_once
from flsim.measures.memorization.search import beam_searches
from flsim.models.language_model import LanguageModel, TrainableModel
from flsim.results.rows import MEASUREMENTS, read_run, read_run_file, refuse_two_points
from flsim.results.sweeps import named_apart, over_runs
from flsim.runs.elsewhere import MeasuredModel
from flsim.runs.folder import Run
from flsim.show.table import json_rows
from flsim.training.update import threads as threads_of_torch

# The strings of an extraction with their controls, and the probability that a model completes them.

Places = list[tuple[Split, Ints]]
POOL = 4  # records that are examined per drawn string, because OOV and repetitions exclude some
CANARY = "canary"
RECORD = "record"


@dataclass(frozen=True, eq=False)
class Strings:
    """N strings of one kind; after `prefix` words, which the attacker knows, follows the suffix.

    `names` are such as ``"heldout:17"``. Strings that training did not read (`is_trained` [N]) are controls.
    """

    kind: str
    prefix: int
    texts: Records
    names: Sequence[str]
    is_trained: Flags

    def __len__(self) -> int:
        return len(self.texts)


def canary_strings(canaries: Sequence[Canary], prefix: int, copies: Ints) -> Strings:
    """Return the canaries of more than `prefix` words, complete; canaries without a copy are controls."""
    longer = [index for index, canary in enumerate(canaries) if len(canary.tokens) > prefix]
    texts = Records.from_lists([list(canaries[index].tokens) for index in longer])
    return Strings(CANARY, prefix, texts, [canaries[index].id for index in longer], copies[longer] > 0)


def records_of(run: Run, rounds: int) -> tuple[Places, Places]:
    """Return the records that training read and no canary replaces, and those by authors outside training."""
    held_out, _ = never_trained(run.corpus)  # first, because it checks the corpus before cohorts are drawn
    return [(run.corpus.split("train"), members_of(run, rounds))], held_out


def record_strings(
    seed: int, canaries: Sequence[Canary], sides: tuple[Places, Places], prefix: int, suffix: int, count: int
) -> Strings:
    """Draw at most `count` beginnings of training records, and as many of held-out records, by the seed.

    Strings are distinct, without OOV and canaries, and of equal lengths on both sides.
    """
    rng = stream(seed, "extraction", prefix)
    planted = {canary.tokens for canary in canaries}
    both = [[*_beginnings(places, prefix, suffix, count, planted, rng).items()] for places in sides]
    lengths, lengths_out = (np.array([len(text) for text, _ in side], np.int64) for side in both)
    chosen = matched(lengths, lengths_out, count, rng)
    drawn = [side[index] for side, indices in zip(both, chosen, strict=True) for index in indices.tolist()]
    texts = Records.from_lists([list(text) for text, _ in drawn])
    is_trained = np.arange(len(drawn)) < len(chosen[0])
    return Strings(RECORD, prefix, texts, [name for _, name in drawn], is_trained)


def _beginnings(
    places: Places, prefix: int, suffix: int, count: int, planted: Collection[tuple[int, ...]], rng: np.random.Generator
) -> dict[tuple[int, ...], str]:
    """Draw records of more than `prefix` words; return the name of one record for each distinct beginning."""
    names = dict[tuple[int, ...], str]()
    for split, positions in places:
        offsets = np.asarray(split.record_offsets)
        longer = positions[offsets[positions + 1] - offsets[positions] > prefix]
        drawn = rng.permutation(longer)[: POOL * count]
        for position, record in zip(drawn.tolist(), split.records_at(drawn), strict=True):
            words = tuple(record.tolist())
            text = words[: prefix + suffix]
            if split.layout.oov not in text and not any(words[: len(phrase)] == phrase for phrase in planted):
                names.setdefault(text, f"{split.folder.name}:{position}")
    return names


# Discoverable extraction: the probability that a model completes a string from its beginning.
#
# [C] Carlini et al., "Quantifying Memorization Across Neural Language Models" (2023), definition 3.1: greedy decoding.
# [H] Hayes et al., "Measuring Memorization in Language Models via Probabilistic Extraction" (2025): a string z is (n,
# p)-discoverable if one of n samples is its suffix with probability p or more:
#
#     1 - (1 - p_z)^n >= p,   that is   n >= log(1 - p) / log(1 - p_z),
#
#     p_z = product over the suffix of Pr(word | all words before it), with the sampling scheme.
#
# One forward pass gives both, because the words before each word of the suffix are those of the string.


@settings
class Scheme:
    """A sampling scheme: from the model's distribution to the sampling distribution, by steps in the fields' order.

    Log-probs are divided by the temperature; of the `top_k` most likely tokens (0 for all), the share `top_p` is used.
    """

    temperature: Positive = 1.0
    top_k: Natural = 40
    top_p: Probability = 1.0


def discover(
    model: TrainableModel, strings: Records, prefix: int, scheme: Scheme, layout: Layout
) -> tuple[Flags, Floats]:
    """Return whether greedy decoding continues prefixes with suffixes [N], and log p_z of the suffixes [N], nats.

    Tokens that are not words can be drawn too; log p_z can be -inf. Raises Diverged if a log-probability is not finite.
    """
    is_greedy, log_probs = np.ones(len(strings), np.bool_), np.zeros(len(strings))
    words: Ints = np.diff(strings.offsets)
    for rows in batches_by_length(strings, layout, floats_at_once(model.device) // layout.vocabulary_size):
        read = batch(strings, rows, layout)
        place = np.arange(read.inputs.shape[1])
        is_suffix = (place >= prefix) & (place < words[rows, None])
        sides = (read.inputs, read.targets, is_suffix)
        inputs, targets, real = (torch.from_numpy(side).to(model.device) for side in sides)
        with torch.no_grad():
            likeliest, log_prob = next_words(model.logits_at(inputs, real), targets[real], scheme)
        owner = rows[is_suffix.nonzero()[0]]
        np.logical_and.at(is_greedy, owner, likeliest.cpu().numpy())
        np.add.at(log_probs, owner, log_prob.cpu().numpy())
    return is_greedy, log_probs


def next_words(logits: Tensor, words: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return whether words [N] are the most likely by logits [N, V], ties to the lower id, and their log-probs [N]."""
    costs, columns = cheapest(nats(logits.log_softmax(-1)) / scheme.temperature, scheme.top_k or logits.shape[1])
    if scheme.top_p < 1:
        shares = (-costs).softmax(-1)
        costs = costs.masked_fill(shares.cumsum(-1) - shares >= scheme.top_p, inf)
    is_custom = columns == words[:, None]
    log_probs = (-costs).log_softmax(-1).masked_fill(~is_custom, -inf).amax(-1)
    return is_custom[:, 0], log_probs


def probability_within(tries: float, log_probs: Floats) -> Floats:
    """Return the probability that one of n samples is the suffix, 1 - (1 - p_z)^n, from log p_z, float64 [N]."""
    with np.errstate(divide="ignore"):  # if p_z is 1
        within: Floats = -np.expm1(tries * np.log1p(-np.exp(log_probs)))
    return within


def least_tries(log_probs: Floats, p: float) -> Floats:
    """Return the smallest n for which one of n samples is the suffix with probability `p`, or infinity [N]."""
    with np.errstate(divide="ignore"):  # if p_z is 0 or 1
        least: Floats = np.ceil(np.log1p(-p) / np.log1p(-np.exp(log_probs)))
    return least.clip(1)


# Rates of extraction, those of controls, and their differences.

TRIES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
P = (0.1, 0.5, 0.9)
USERS = (1.0, 2.0, 5.0, 10.0, np.inf)
GREEDY, SAMPLING, ONE_WORD, NEAR = "greedy", "sampling", "one-word prompt", "near-verbatim"
BLEU = 0.75  # Ippolito et al., "Preventing Verbatim Memorization Gives a False Sense of Privacy" (2022), section 4
KEY = ("kind", "prefix", "attack", "n", "p")


def rates_of(strings: pd.DataFrame, edits: int | None = None) -> pd.DataFrame:
    """Return the rate of each attack among trained strings and among controls, and the excess.

    There is a row per kind, prefix, attack and, of sampling, n and p; with `edits`, also of similar suffixes. Columns
    of controls begin with ``control_`` (intervals: Clopper and Pearson, 1934). ``excess`` is the difference, with the
    interval of Newcombe (1998). A rate among no strings is NaN.
    """
    rows = []
    for (kind, prefix), group in strings.groupby(["kind", "prefix"], sort=False):
        is_trained = group["is_trained"].to_numpy(bool)
        for attack, n, p, is_extracted in _attacks(group, edits):
            columns = dict(zip(KEY, (kind, prefix, attack, n, p), strict=True))
            rows.append(columns | against_controls(is_extracted[is_trained], is_extracted[~is_trained]))
    return pd.DataFrame(rows)


def eidetic_of(strings: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of extracted strings that at most k users hold, with controls, in columns as of `rates_of`.

    A control has no owner, so at most k - 1 users hold it. Rows are for greedy decoding, and sampling at p = 0.5.
    """
    rows = []
    for (kind, prefix), group in strings.groupby(["kind", "prefix"], sort=False):
        is_trained, users = group["is_trained"].to_numpy(bool), group["k_users"].to_numpy()
        for attack, n, p, is_extracted in _attacks(group):
            if attack != GREEDY and (n, p) != (TRIES[-1], P[1]):
                continue
            for most in USERS:
                trained, controls = is_trained & (users <= most), ~is_trained & (users <= most - 1)
                columns = dict(zip(KEY, (kind, prefix, attack, n, p), strict=True)) | {"k_users": most}
                rows.append(columns | against_controls(is_extracted[trained], is_extracted[controls]))
    return pd.DataFrame(rows)


def _attacks(strings: pd.DataFrame, edits: int | None = None) -> Iterator[tuple[str, float, float, Flags]]:
    """Yield each attack, with n and p of sampling, and the strings it extracts; with `edits`, similar suffixes too."""
    yield GREEDY, np.nan, np.nan, strings["is_greedy"].to_numpy(bool)
    for tries in TRIES:
        within = probability_within(tries, strings["log_probability"].to_numpy("float64"))
        for p in P:
            yield SAMPLING, tries, p, within >= p
    yield ONE_WORD, np.nan, np.nan, strings["is_elicited"].to_numpy(bool)
    yield NEAR, np.nan, np.nan, strings["is_near"].to_numpy(bool)
    if edits is not None:
        most = (strings["words"] - strings["prefix"] - 1).clip(upper=min(edits, 2**31))
        yield f"edit distance {edits}", np.nan, np.nan, (strings["edit_distance"] <= most).to_numpy(bool)
        yield f"BLEU {BLEU}", np.nan, np.nan, (strings["bleu"] > BLEU).to_numpy(bool)


def against_controls(trained: Flags, controls: Flags) -> dict[str, float]:
    """Return the rates of two sides and their difference, as columns of `rates_of`."""
    row: dict[str, float] = {}
    for name, is_extracted in (("", trained), ("control_", controls)):
        hits, strings = int(is_extracted.sum()), len(is_extracted)
        row |= {f"{name}strings": strings, f"{name}extracted": hits}
        values = (hits / strings, *share_interval(hits, strings)) if strings else [np.nan] * 3
        row |= dict(zip((f"{name}rate", f"{name}low", f"{name}high"), values, strict=True))
    low, high = np.nan, np.nan
    if len(trained) and len(controls):
        low, high = difference_interval(int(trained.sum()), len(trained), int(controls.sum()), len(controls))
    return row | {"excess": row["rate"] - row["control_rate"], "excess_low": low, "excess_high": high}


# Extraction with other prompts than the beginning of a string, and near-verbatim extraction.
#  Schwarzschild et al., "Rethinking LLM Memorization through the Lens of Adversarial Compression" (2024), search for
# the shortest prompt with which greedy decoding generates a string. All prompts of one word can be tried.

ORDER = 4  # length of the longest n-grams in BLEU
WRONG = 1  # number of words that can differ in a near-verbatim suffix


def one_word_continuations(model: LanguageModel, length: int, layout: Layout, device: torch.device) -> Ints:
    """Return the output of greedy decoding after each word of the vocabulary, int64 [words, length]."""
    words = torch.arange(layout.first_word, layout.last_word + 1, device=device)
    prompts = torch.stack([torch.full_like(words, layout.bos), words], dim=1)
    return greedy(model, prompts, length).cpu().numpy()


def greedy(model: LanguageModel, prompts: Tensor, length: int) -> Tensor:
    """Return the output of greedy decoding after prompts int64 [N, L], int64 [N, length], in batches that fit."""
    state, log_probs = model.start(prompts[:1])
    parts = []
    for part in torch.split(prompts, rows_at_once(log_probs, state)):
        state, log_probs = model.start(part)
        written = [nats(log_probs).argmin(-1)]
        while len(written) < length:
            state, log_probs = model.step(state, written[-1])
            written.append(nats(log_probs).argmin(-1))
        parts.append(torch.stack(written, dim=1))
    return torch.cat(parts)


def is_elicited(continuations: Ints, strings: Records, prefix: int) -> Flags:
    """Return whether the continuation [prompts, words] of any prompt is the suffix of each string, bool [N]."""
    suffixes = [tuple(string[prefix:].tolist()) for string in strings]
    written = {size: set(map(tuple, continuations[:, :size].tolist())) for size in set(map(len, suffixes))}
    return np.array([suffix in written[len(suffix)] for suffix in suffixes], np.bool_)


def edit_distances(written: Ints, wanted: Ints) -> Ints:
    """Return the edit distances (Levenshtein, 1966) of texts [..., L] and [..., M] of tokens, int64 [...]."""
    before = list(range(wanted.shape[-1] + 1))  # distances of each beginning of `wanted` from that of `written`
    for length in range(1, written.shape[-1] + 1):
        after = [length]
        for index, deleted in enumerate(before[1:]):
            is_other = written[..., length - 1] != wanted[..., index]
            after.append(np.minimum(np.minimum(deleted, after[index]) + 1, before[index] + is_other))
        before = after
    return np.asarray(before[-1])


def bleu(written: Sequence[int], wanted: Sequence[int]) -> float:
    """Return the BLEU score of one text, in [0, 1], with one reference (Papineni et al., 2002, section 2.3).

    The score has n-grams of up to `ORDER` tokens, or of all tokens of a shorter text, with equal weights, and no
    smoothing.

    >>> round(bleu([1, 2, 3, 4, 9], [1, 2, 3, 4, 5]), 3)
    0.669
    """
    orders = range(1, min(ORDER, len(written)) + 1)
    grams = [
        [Counter(zip(*(text[at:] for at in range(n)), strict=False)) for text in (written, wanted)] for n in orders
    ]
    matches = [(own & reference).total() for own, reference in grams]
    precisions = [count / (len(written) - n + 1) for n, count in zip(orders, matches, strict=True)]
    return exp(min(0, 1 - len(wanted) / len(written))) * prod(precisions) ** (1 / len(orders))


def near_verbatim(
    model: LanguageModel, strings: Records, prefix: int, width: int, layout: Layout, device: torch.device
) -> tuple[Flags, Ints, Floats]:
    """Return how near a beam search, with 1 beam greedy among tokens of text, continues each prefix to the suffix.

    Whether at most `WRONG` words differ (of one word, none), bool [N]; edit distance, int64 [N]; BLEU, float64 [N].
    """
    lengths: Ints = np.diff(strings.offsets) - prefix
    is_near, edits, scores = np.zeros(len(strings), np.bool_), lengths.copy(), np.zeros(len(strings))
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        texts = torch.tensor(np.stack([strings[row].astype(np.int64) for row in rows.tolist()]), device=device)
        prefixes = torch.cat([torch.full_like(texts[:, :1], layout.bos), texts[:, :prefix]], dim=1)
        beams, _ = beam_searches(model, prefixes, Template.text(layout, length), width)
        written, suffixes = beams.cpu().numpy(), texts[:, prefix:].cpu().numpy()
        wrong = (written != suffixes[:, None]).sum(-1).min(-1)
        is_near[rows] = wrong <= min(WRONG, length - 1)
        edits[rows] = edit_distances(written, suffixes[:, None]).min(-1)
        pairs = zip(written.tolist(), suffixes.tolist(), strict=True)
        scores[rows] = [max(bleu(beam, suffix) for beam in each) for each, suffix in pairs]
    return is_near, edits, scores


# The number of training records, and of users, whose text contains a string.
#  Neel and Chang, "Privacy Issues in Large Language Models: A Survey" (2023), definition 2, after Carlini et al.
# (2021): a string is k-eidetic memorized if it can be extracted and at most k training examples contain it.

RECORDS = 2**16  # words that are searched at once


def occurrences(users: Population, strings: Records) -> tuple[Ints, Ints]:
    """Return the numbers of records and of users (of `in_place`) whose text contains each string, int64 [N] each."""
    index = NGrams(strings)
    offsets = np.concatenate([np.asarray(users.user_offsets), users.records + users.extra.offsets[1:]])
    in_records, in_users = np.zeros(index.groups, np.int64), np.zeros(index.groups, np.int64)
    # users with an occurrence of a group; the records of a user can be in two pieces
    last_user = np.zeros(index.groups, np.int64)
    for first in range(0, int(offsets[-1]), RECORDS):
        positions = np.arange(first, min(first + RECORDS, int(offsets[-1])))
        group, record = np.unique(np.stack(index.find(users.records_at(positions))), axis=1)
        in_records += np.bincount(group, minlength=index.groups)
        user = offsets.searchsorted(positions[record], side="right")  # windows are counted from 1
        group, user = np.unique(np.stack([group, user]), axis=1)
        in_users += np.bincount(group[user != last_user[group]], minlength=index.groups)
        np.maximum.at(last_user, group, user)
    return in_records[index.group], in_users[index.group]


def in_place(users: Population, canaries: tuple[Canary, ...], rounds: int) -> Population:
    """Return training users with all canaries that were planted in one of the first rounds."""
    placed = tuple(
        replace(one, is_planted=_is_planted(one, rounds), first_round=None, last_round=None) for one in canaries
    )
    is_placed = np.array([canary.is_planted for canary in placed], np.bool_)[users.overlay.canaries]
    overlay = Overlay(users.overlay.records[is_placed], users.overlay.canaries[is_placed])
    return Population.with_canaries(users.split, placed, overlay, users.twin)


def copies_in(users: Population, canaries: int) -> Ints:
    """Return the number of records that each canary replaces, int64 [canaries]."""
    return np.bincount(users.overlay.canaries, minlength=canaries) + np.bincount(users.injected, minlength=canaries)


def _is_planted(canary: Canary, rounds: int) -> bool:
    last = rounds if canary.last_round is None else min(rounds, canary.last_round)
    return canary.is_planted and (canary.first_round or 1) <= last


# `flsim extract`: settings, and extraction from a run.

PREFIXES = (1, 3, 5, 10)


@settings
class ExtractionHParams:
    """Settings of an extraction; see `extract`. `count` is its `records`."""

    prefixes: Annotated[tuple[Count, ...], DIFFERENT] = ()
    suffix: Count = 5
    count: Count = 1_000
    scheme: Scheme = field(default_factory=Scheme)
    edits: Natural | None = None
    round: int | None = None
    epoch: float | None = None
    device: str = "cpu"
    elsewhere: ElsewhereHParams = field(default_factory=ElsewhereHParams)

    def __post_init__(self) -> None:
        refuse_two_points(self.round, self.epoch)
        refuse_missing_device(self.device)


@dataclass(frozen=True, eq=False, kw_only=True)
class Extraction(Result):
    """The result of `flsim extract`. Each table has the columns run, setting, series, seed and round.

    Attributes:
        frame: a row per attack; see `flsim.attacks.extraction.extract.rates_of`.
        strings: a row per string and prefix: kind, prefix, name, words, is_trained, is_greedy, log_probability (log
            p_z in nats), least_n_0.1, least_n_0.5 and least_n_0.9, is_elicited, is_near, edit_distance, bleu,
            k_records and k_users.
        eidetic: a row per attack and number of users; see `flsim.attacks.extraction.extract.eidetic_of`.
        scheme: how words are sampled.
    """

    strings: pd.DataFrame
    eidetic: pd.DataFrame
    scheme: Scheme

    @property
    def rates(self) -> pd.DataFrame:
        return self.frame

    @property
    def over_seeds(self) -> pd.DataFrame:
        """Return rates and excess as means over the seeds of each setting; see `flsim.attacks.result.over_seeds`."""
        value = {"rate": "", "control_rate": "control_", "excess": "excess_"}
        by = ("setting", "series", *KEY)
        refuse_unlike(self.frame, by)
        return over_seeds(self.frame, by, value)

    def to_json(self) -> dict[str, Any]:
        """Return the scheme and the rows of all tables; unknown values, and infinite numbers, are None.

        There are no rows over seeds if runs of a setting cannot be averaged.
        """
        tables = {name: json_rows(getattr(self, name)) for name in ("rates", "eidetic", "strings")}
        try:
            means = json_rows(self.over_seeds)
        except InputError:
            means = []
        return {"scheme": asdict(self.scheme)} | tables | {"over_seeds": means}


def extract(
    *runs: Path | str,
    prefixes: Sequence[int] = (),
    suffix: int = 5,
    records: int = 1_000,
    temperature: float = 1.0,
    top_k: int = 40,
    top_p: float = 1.0,
    edits: int | None = None,
    round: int | None = None,
    epoch: float | None = None,
    device: str = "cpu",
    elsewhere: ElsewhereHParams | None = None,
) -> Extraction:
    """Measure which canaries and training records can be extracted from models, like `flsim extract`.

    Args:
        runs: run folders and folders of sweeps; or folders that hold some, such as the folder of a demo.
        prefixes: numbers of words that the attacker knows; by default those of 1, 3, 5 and 10 that are shorter than
            strings.
        suffix: largest number of words after the prefix of a record; for canaries, all words.
        records: largest number of training records, and of held-out records.
        temperature: divisor of log-probs for sampling.
        top_k: number of the most likely tokens to sample from; 0 for all.
        top_p: share of probability of the most likely tokens to sample from.
        edits: also return rates of suffixes with at most this number of edited words, and with BLEU above 0.75.
        round: round of the checkpoint; the newest one of each run if not given.
        epoch: the number of passes over all records instead of `round`; this point must be evaluated.
        device: torch device, such as "cuda".
        elsewhere: settings for models that were trained elsewhere.

    Raises:
        InputError: there is no such run or checkpoint, a run diverged, no author is held out of training, a prefix is
            too long, or a setting is out of its range.
        Diverged: a log-probability is not finite.

    Examples:
        >>> measured = flsim.extract("runs/demo", prefixes=[1, 3])                              # doctest: +SKIP
        >>> measured.rates[["setting", "kind", "prefix", "attack", "rate", "excess"]]           # doctest: +SKIP
    """
    scheme = Scheme(temperature, top_k, top_p)
    words = as_list("prefixes", prefixes)
    more = elsewhere or ElsewhereHParams()
    hparams = ExtractionHParams(tuple(words), suffix, records, scheme, edits, round, epoch, device, more)
    parts = over_runs(runs, lambda path: extract_run(path, hparams))
    names = named_apart(parts)
    named = [[table.assign(**names[path]) for table in tables] for path, tables in parts.items()]
    strings, rates, eidetic = (pd.concat(tables, ignore_index=True) for tables in zip(*named, strict=True))
    return Extraction(frame=rates, strings=strings, eidetic=eidetic, scheme=scheme)


@restrict_custom_code("architecture")
def extract_run(path: Path, hparams: ExtractionHParams) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    is_elsewhere = (path / MEASUREMENTS).is_file()
    with threads_of_torch(1):
        attacked = _of_measurements(path, hparams) if is_elsewhere else _of_run(path, hparams)
        measured = pd.concat(_measured(attacked, hparams.scheme), ignore_index=True)
    measured["k_records"], measured["k_users"] = attacked.counts()
    tables = (measured, rates_of(measured, hparams.edits), eidetic_of(measured))
    first, second, third = (table.assign(run=str(path), **attacked.about) for table in tables)
    return first, second, third


@dataclass(frozen=True, eq=False)
class PromptedRun:
    model: TrainableModel
    layout: Layout
    groups: Sequence[Strings]
    beam_width: int
    about: dict[str, Any]  # setting, series, seed and round
    # returns the numbers of training records and of users that contain each string, int64 [N] each
    counts: Callable[[], tuple[Ints, Ints]]


def _of_run(path: Path, hparams: ExtractionHParams) -> PromptedRun:
    hparams.elsewhere.refuse_for(path)
    run = Run.open(path)
    described = read_run_file(path)
    round_ = _round_of(path, hparams)
    if described["status"] == "diverged" and round_ is None:
        raise InputError(f"{path}: diverged ({described['reason']}); name a checkpoint before that with --round")
    state, model = attacked_model(run, round_, hparams.device)
    users = in_place(run.users, run.canaries, state.round)
    copies, sides = copies_in(users, len(run.canaries)), records_of(run, state.round)
    groups = _strings_of(path, run.config.seed, run.canaries, copies, sides, hparams)

    def counts() -> tuple[Ints, Ints]:
        counted = occurrences(users, Records.joined([group.texts for group in groups]))
        run.verify()  # measurements on other data must not be returned
        return counted

    about = {"setting": run.setting, "series": run.series, "seed": run.config.seed, "round": state.round}
    return PromptedRun(model, run.corpus.layout, groups, run.config.evaluation.beam_width, about, counts)


def _of_measurements(path: Path, hparams: ExtractionHParams) -> PromptedRun:
    """Return the strings of a model that was trained elsewhere: its canaries, and records of files."""
    measured = MeasuredModel.open(path, _round_of(path, hparams), hparams.elsewhere.model, hparams.device)
    canaries, results = measured.canaries, read_run(path)
    planting, sides, training = canaries.planting, None, None
    if hparams.elsewhere.members is not None:
        members, others = sides_of(canaries, measured.model, hparams.elsewhere)
        sides = [members], [others]
        training = Population(members[0], (), Overlay(np.empty(0, np.int64), np.empty(0, np.uint16)))
    seed, all_canaries = canaries.seed, planting.canaries
    groups = _strings_of(path, seed, all_canaries, planting.insertions, sides, hparams)

    def counts() -> tuple[Ints, Ints]:
        if training is not None:
            return occurrences(training, Records.joined([group.texts for group in groups]))
        place = {canary.id: index for index, canary in enumerate(all_canaries)}
        index = [place[name] for group in groups for name in group.names]
        return planting.insertions[index], planting.sharers[index]

    about = {"setting": results.setting, "series": results.series, "seed": seed, "round": measured.round}
    width = results.settings["evaluation.beam_width"]
    return PromptedRun(measured.model, canaries.words.layout, groups, width, about, counts)


def _round_of(path: Path, hparams: ExtractionHParams) -> int | None:
    return hparams.round if hparams.epoch is None else read_run(path).at(epoch=hparams.epoch)


def _strings_of(
    path: Path,
    seed: int,
    canaries: Sequence[Canary],
    copies: Ints,
    sides: tuple[Places, Places] | None,
    hparams: ExtractionHParams,
) -> list[Strings]:
    """Return the strings of each kind and prefix; kinds without strings are omitted."""
    groups = list[Strings]()
    for prefix in hparams.prefixes or PREFIXES:
        both = [canary_strings(canaries, prefix, copies)]
        if sides is not None:
            both.append(record_strings(seed, canaries, sides, prefix, hparams.suffix, hparams.count))
        if prefix in hparams.prefixes and not any(map(len, both)):
            raise InputError(
                f"{path}: prefix {prefix}: no canary, and no record of both training and held-out users, has more "
                f"than {prefix} words of the vocabulary; name a shorter prefix"
            )
        groups += [group for group in both if len(group)]
    if not groups:
        raise InputError(
            f"{path}: there are no canaries and no records to extract at this round; choose a later --round"
        )
    return groups


def _measured(attacked: PromptedRun, scheme: Scheme) -> Iterator[pd.DataFrame]:
    """Yield a table of the strings of each group, without the numbers of records and users."""
    model, layout, groups = attacked.model, attacked.layout, attacked.groups
    device = model.device
    longest = max(int(np.diff(group.texts.offsets).max()) - group.prefix for group in groups)
    continuations = one_word_continuations(model, longest, layout, device)
    for group in tracked("extracting", groups):
        prefix, texts = group.prefix, group.texts
        is_greedy, log_probs = discover(model, texts, prefix, scheme, layout)
        is_near, edits, scores = near_verbatim(model, texts, prefix, attacked.beam_width, layout, device)
        yield pd.DataFrame(
            {
                "kind": group.kind,
                "prefix": prefix,
                "name": group.names,
                "words": np.diff(texts.offsets),
                "is_trained": group.is_trained,
                "is_greedy": is_greedy,
                "log_probability": log_probs,
                **{f"least_n_{p:g}": least_tries(log_probs, p) for p in P},
                "is_elicited": is_elicited(continuations, texts, prefix),
                "is_near": is_greedy | is_near,
                "edit_distance": np.where(is_greedy, 0, edits),
                "bleu": np.where(is_greedy, 1.0, scores),
            }
        )
