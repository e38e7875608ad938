"""`flsim extract`: extraction of strings from the models of runs, compared with strings outside training."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from flsim.attacks.extraction.rates import KEY, P, eidetic_of, rates_of
from flsim.attacks.extraction.strings import (
    Places,
    Scheme,
    Strings,
    canary_strings,
    discover,
    least_tries,
    record_strings,
    records_of,
)
from flsim.attacks.membership.attacked import ElsewhereHParams, attacked_model
from flsim.attacks.membership.inference import sides_of
from flsim.attacks.result import Result, over_seeds, refuse_unlike
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError, as_list
from flsim.base.extensions import restrict_custom_code
from flsim.base.machine import refuse_missing_device
from flsim.base.progress import tracked
from flsim.base.settings import DIFFERENT, Count, Natural, settings
from flsim.canaries.planting import Overlay
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.records import Records
from flsim.data.sentences import NGrams
from flsim.data.vocabulary import Layout
from flsim.measures.memorization.score import Template, nats, rows_at_once
from flsim.measures.memorization.search import beam_searches
from flsim.models.language_model import LanguageModel, TrainableModel
from flsim.results.seeds import named_apart
from flsim.results.store import MEASUREMENTS, read_run, read_run_file, refuse_two_points
from flsim.results.sweeps import over_runs
from flsim.runs.elsewhere import MeasuredModel
from flsim.runs.folder import Run
from flsim.show.table import json_rows
from flsim.training.local import threads as threads_of_torch

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
        frame: a row per attack; see `flsim.attacks.extraction.rates.rates_of`.
        strings: a row per string and prefix: kind, prefix, name, words, is_trained, is_greedy, log_probability (log
            p_z in nats), least_n_0.1, least_n_0.5 and least_n_0.9, is_elicited, is_near, edit_distance, bleu,
            k_records and k_users.
        eidetic: a row per attack and number of users; see `flsim.attacks.extraction.rates.eidetic_of`.
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
class Attacked:
    model: TrainableModel
    layout: Layout
    groups: Sequence[Strings]
    beam_width: int
    about: dict[str, Any]  # setting, series, seed and round
    # returns the numbers of training records and of users that contain each string, int64 [N] each
    counts: Callable[[], tuple[Ints, Ints]]


def _of_run(path: Path, hparams: ExtractionHParams) -> Attacked:
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
    return Attacked(model, run.corpus.layout, groups, run.config.evaluation.beam_width, about, counts)


def _of_measurements(path: Path, hparams: ExtractionHParams) -> Attacked:
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
    return Attacked(measured.model, canaries.words.layout, groups, width, about, counts)


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


def _measured(attacked: Attacked, scheme: Scheme) -> Iterator[pd.DataFrame]:
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
