"""Benchmark of ranks of canaries among R, of decisions on them, and of complete scores of every reference."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flsim.base.errors import InputError, at_least_one
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.canaries.spec import draw_phrase
from flsim.data.records import Layout, Records, batch
from flsim.data.synthetic import Language, SyntheticHParams, draw_users
from flsim.measures.memorization.score import RandomSampler, log_perplexity, references
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.models.language_model import loss_sum

LAYOUT, SEED, WORDS = Layout(10_000), 0, 5
RECORDS, CANARY_RECORDS, LEARNING_RATE, MOMENTUM = 24, 8, 0.05, 0.9
CORPUS = SyntheticHParams(users=60, words_per_user=2_000, vocabulary_size=LAYOUT.vocabulary_size)
RANKED = 10  # every tenth canary is ranked on a CPU, and scored straightforwardly anywhere
STRAIGHTFORWARD = 20_000  # references that are scored completely
SLACK = 1e-5  # relative: references with scores closer to the canary's may be above or below it

Pair = tuple[Tensor, Tensor]
Result = TypeVar("Result")


def bench_evaluation(
    canaries: int = 90, count: int = 2_000_000, device: str = "cpu", steps: int = 1_000, units: int = 670
) -> dict[str, Any]:
    """Measure seconds of exact ranks, decisions, and straightforward scores of the same canaries on one model.

    Decisions are on all canaries. Ranks are of every tenth canary on a CPU, and of all on a GPU. Straightforward scores
    are of every tenth canary and of fewer references. Results of two methods for the same canary are compared.

    Args:
        canaries: number of canaries to decide on.
        count: |R|.
        device: "cpu" or "cuda".
        steps: steps of training before.
        units: H, size of the model.

    Returns:
        ``device``, ``threads``, ``model``, ``memorized`` (number of canaries), ``rank_seconds``, ``decide_seconds``,
        ``straightforward_seconds``; in ``measured_at``, for each, ``references`` and ``canaries``; ``speedup`` of
        ``rank`` and ``decide`` over straightforward scores, by seconds per canary and reference.

    Raises:
        InputError: there is no such device, or a size is below 1.
        RuntimeError: two methods disagree.
    """
    at_least_one(canaries=canaries, references=count, steps=steps, units=units)
    if device not in ("cpu", "cuda"):
        raise InputError(f'device must be "cpu" or "cuda", found "{device}"')
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError('device is "cuda", but torch finds no GPU here; use "cpu"')
    phrases = [draw_phrase(SEED, index, 0, WORDS, LAYOUT) for index in range(canaries)]
    model = mid_training(phrases, steps, units, device)
    pairs = [_pair(phrase, device) for phrase in phrases]
    every = RANKED if device == "cpu" else 1
    ranked, scored = pairs[::every], pairs[::RANKED]
    drawn, few = (references(SEED, size, WORDS - 1, LAYOUT).to(device) for size in (count, min(STRAIGHTFORWARD, count)))
    sampler, of_few = RandomSampler(model, drawn), RandomSampler(model, few)
    of_few.rank(*pairs[0])  # initializes everything that is initialized at the first use
    decisions, decide_seconds = _timed("decisions", sampler.decide, pairs)
    ranks, rank_seconds = _timed("exact ranks", sampler.rank, ranked)
    scores, plain_seconds = _timed("straightforward", lambda p, _: log_perplexity(model, p, few), scored)
    if [one.memorized for one in ranks] != decisions[::every]:
        raise RuntimeError("a decision differs from the rank")
    for pair, plain in zip(scored, scores, strict=True):
        rank = of_few.rank(*pair)
        least, most = ((plain <= rank.log_perplexity * (1 + slack)).sum() for slack in (-SLACK, SLACK))
        if not 1 + least <= rank.rank <= 1 + most:
            raise RuntimeError(f"rank {rank.rank} is not among {1 + least} to {1 + most}, by straightforward scores")
    measured_at = {
        "rank": {"references": count, "canaries": len(ranked)},
        "decide": {"references": count, "canaries": canaries},
        "straightforward": {"references": len(few), "canaries": len(scored)},
    }
    seconds = {"rank": rank_seconds, "decide": decide_seconds, "straightforward": plain_seconds}
    seconds_each = {name: seconds[name] / at["references"] / at["canaries"] for name, at in measured_at.items()}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "model": f"V = {LAYOUT.vocabulary_size:,}, {units} units, partly trained: {steps:,} steps of SGD with momentum "
        f"on {RECORDS} synthetic records and {CANARY_RECORDS} copies of canaries each; a third of the canaries "
        "is planted often, four ninths more and more rarely, the others never",
        "memorized": sum(decisions),
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "measured_at": measured_at,
        "speedup": {name: seconds_each["straightforward"] / seconds_each[name] for name in ("rank", "decide")},
    }


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = [f"{measured['device']}, {measured['threads']} threads", f"model: {measured['model']}"]
    for name, at in measured["measured_at"].items():
        line = f"{name:<16}{measured[f'{name}_seconds']:9.2f} s for {at['canaries']} canaries, |R| {at['references']:,}"
        faster = measured["speedup"].get(name)
        lines.append(line + (f", {faster:,.0f} times as fast as straightforward scores" if faster else ""))
    return "\n".join([*lines, f"memorized       {measured['memorized']} canaries"])


def mid_training(phrases: Sequence[tuple[int, ...]], steps: int, units: int, device: str = "cpu") -> CIFGLanguageModel:
    """Return a model that has memorized some phrases, has partly memorized others, and has not read the rest."""
    rarer = 4 * len(phrases) // 9
    often = max(1, len(phrases) // 3)
    plan = np.zeros(len(phrases))
    plan[:often] = 1
    plan[often : often + rarer] = np.geomspace(0.8, 0.02, rarer)
    part = draw_users(Language.draw(CORPUS, SEED), CORPUS, SEED, [f"train{user}" for user in range(CORPUS.users)])
    offsets = np.cumsum([0, *part.record_words], dtype=np.int64)
    corpus = Records((part.tokens + LAYOUT.first_word).astype(np.uint16), offsets)
    model = CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(units=units)).initialize(SEED).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for step in tracked("training", range(steps), unit="steps"):
        rng = stream(SEED, "bench evaluation", step)
        texts = [corpus[index].tolist() for index in rng.choice(len(corpus), RECORDS)]
        texts += [list(phrases[index]) for index in rng.choice(len(phrases), CANARY_RECORDS, p=plan / plan.sum())]
        read = batch(Records.from_lists(texts), np.arange(len(texts)), LAYOUT)
        inputs, targets = (torch.from_numpy(values).to(device) for values in (read.inputs, read.targets))
        loss, words = loss_sum(model, inputs, targets)
        optimizer.zero_grad()
        (loss / words).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.requires_grad_(False)


def _pair(phrase: tuple[int, ...], device: str) -> Pair:
    """Return a prefix of BOS and one word, and the continuation."""
    tokens = torch.tensor((LAYOUT.bos, *phrase), device=device)
    return tokens[:2], tokens[2:]


def _timed(title: str, work: Callable[[Tensor, Tensor], Result], pairs: Sequence[Pair]) -> tuple[list[Result], float]:
    began = time.perf_counter()
    done = [work(*pair) for pair in tracked(title, pairs, unit="canaries")]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return done, time.perf_counter() - began
