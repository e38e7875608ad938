"""Benchmark `flsim bench characters`: characters that networks of The Secret Sharer train on per second.

Beside ours stands a plain PyTorch loop over the same steps: torch's own cells, batches padded to their longest line,
autograd. Lines are drawn: 120 characters on average, as in Penn Treebank (5 MB in 42,068 lines).
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flsim.base.errors import RunFailed
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.bench.central import distance, padded_batches, plain_loop
from flsim.data.corpus import Split
from flsim.data.vocabulary import Layout
from flsim.models.architectures import restore
from flsim.models.hparams import ModelHParams
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.engines import engine_of

LAYOUT = Layout(54, record_words=600)  # 50 characters
SHAPE = 4.0  # of the gamma distribution of lines' lengths, whose deviation is then half of its mean
RATE = 0.5  # so that weights change by far more than they are rounded
FAR = 0.01  # share of what training changed; beyond it two sides have not done the same
NETWORKS = {  # Table 1, with embeddings that give 620,000 parameters
    "gru, 2 layers": ModelHParams(120, 235, "gru", layers=2),
    "lstm, 1 layer": ModelHParams(127, 320, "lstm"),
    "lstm, 2 layers": ModelHParams(127, 200, "lstm", layers=2),
    "convolutional, 2 layers": ModelHParams(127, 188, "convolutional", layers=2, filter_width=10),
}


@dataclass(frozen=True)
class CharactersBenchHParams:
    """Settings of the benchmark.

    Attributes:
        networks: names of networks in `NETWORKS`.
        batch_size: lines in a step.
        steps: steps of each side in a turn.
        turns: number of turns of each side. Sides alternate, so that a noisy machine disturbs both; the first turn is
            left out.
        threads: torch threads.
        length: mean number of characters in a line.
    """

    networks: tuple[str, ...] = tuple(NETWORKS)
    batch_size: int = 128
    steps: int = 2
    turns: int = 4
    threads: int = 1
    length: int = 120


def bench_characters(hparams: CharactersBenchHParams = CharactersBenchHParams()) -> dict[str, Any]:
    """Measure central training and the plain loop.

    Returns:
        By network: ``characters_per_second`` by side ("ours", with reading and packing, and "plain", with batches made
        before), their ``ratio``, and the ``distance`` of the final models, relative to the change by training. Also
        ``padding``, the share of the plain loop's positions that are none, ``threads``, ``batch_size``.

    Raises:
        RunFailed: the final models differ.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(hparams.threads)
    try:
        measured = {name: _measure(name, hparams) for name in hparams.networks}
    finally:
        torch.set_num_threads(threads)
    padding = {name: row.pop("padding") for name, row in measured.items()}
    return {
        **{what: {name: row[what] for name, row in measured.items()} for what in next(iter(measured.values()))},
        "padding": next(iter(padding.values())),
        "threads": hparams.threads,
        "batch_size": hparams.batch_size,
    }


def describe(measured: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = [
        f"lines in a step: {measured['batch_size']}; threads: {measured['threads']}; "
        f"{measured['padding']:.0%} of the plain loop's positions are padding"
    ]
    for name, rates in measured["characters_per_second"].items():
        lines.append(
            f"{name:>24}: {rates['ours']:9,.0f} characters/s, plain loop {rates['plain']:8,.0f}: "
            f"{measured['ratio'][name]:.2f} times"
        )
    return "\n".join(lines)


def lines_of(count: int, length: int) -> Split:
    """Return drawn lines of so many characters on average, as a split with one user."""
    rng = stream(0, "bench characters")
    lengths = rng.gamma(SHAPE, length / SHAPE, count).round().astype(np.int64).clip(1, LAYOUT.record_words)
    tokens = LAYOUT.first_word + rng.integers(LAYOUT.words, size=int(lengths.sum()))
    offsets = np.concatenate([[0], lengths.cumsum()])
    return Split(LAYOUT, tokens.astype(LAYOUT.token_type), offsets, np.array([0, count]), Path())


def _measure(name: str, hparams: CharactersBenchHParams) -> dict[str, Any]:
    say(f"characters: {name}")
    model_hparams, total = NETWORKS[name], hparams.steps * hparams.turns
    lines = lines_of(hparams.batch_size * total, hparams.length)
    settings = CentralHParams(batch_size=hparams.batch_size, learning_rate=RATE)
    training = CentralTraining(lines, settings, 0, model=model_hparams)
    first = init(LAYOUT.vocabulary_size, model_hparams, 0)
    model = restore(first.params, model_hparams, LAYOUT.vocabulary_size)
    optimizer, engine, state = torch.optim.SGD(model.parameters(), training.rate(0)), engine_of(training, first), first
    ours, plain, read, padded = 0.0, 0.0, 0, 0
    for turn in range(hparams.turns):
        until = hparams.steps * (turn + 1)
        began = time.perf_counter()
        ((state, log),) = train_central(state, training, until, title=name, engine=engine)
        seconds = time.perf_counter() - began
        batches = padded_batches(training, until - hparams.steps, until)
        plain_seconds = plain_loop(model, optimizer, batches, "cpu")
        if turn:
            ours, plain = ours + seconds, plain + plain_seconds
            read, padded = read + log.tokens, padded + sum(inputs.numel() for inputs, _ in batches)
    apart = distance(first, state, model)
    if not apart < FAR:
        raise RunFailed(f"{name}: the plain loop came to another model: {apart:.1%} off ours")
    return {
        "characters_per_second": {"ours": read / ours, "plain": read / plain},
        "ratio": plain / ours,
        "distance": apart,
        "padding": 1 - read / padded,
    }
