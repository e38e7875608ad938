"""Benchmark of LoRA adapters: users per second one at a time, as peft and torch train them, and in blocks.

    python -m benchmarks lora

The benchmark needs only torch, numpy, transformers and peft, and draws base and users itself.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.engine import CLIP
from flsim.base.rng import stream
from flsim.data.records import Layout, Records
from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import Dtype, LoraHParams
from flsim.training.cohort.engine import BlockTrainer, CohortEngine
from flsim.training.update import LocalHParams


@dataclass(frozen=True)
class LoraBenchHParams:
    """Sizes of the measurement.

    Attributes:
        config: settings of the base, by transformers' names.
        vocabulary: V.
        rank: rank of the adapters, of all linear layers.
        dtype: type of the base's values.
        steps: local steps of a user.
        rows, words: records of a step, and positions of a record: rows * words tokens a step.
        single: number of users that are measured one at a time.
        at_once: numbers of users in a block; two blocks of each are measured.
    """

    config: dict[str, Any] = field(
        default_factory=lambda: {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 64}
    )
    vocabulary: int = 4_096
    rank: int = 8
    dtype: Dtype = "float32"
    steps: int = 2
    rows: int = 4
    words: int = 12
    single: int = 8
    at_once: tuple[int, ...] = (8,)

    @property
    def layout(self) -> Layout:
        return Layout(self.vocabulary, self.words)

    @property
    def model(self) -> ModelHParams:
        lora = LoraHParams(rank=self.rank, alpha=2 * self.rank)
        return ModelHParams(architecture="hf", config=self.config, dtype=self.dtype, lora=lora)

    @property
    def local(self) -> LocalHParams:
        return LocalHParams(batch_size=self.rows, learning_rate=0.1)


GPT2_SMALL = LoraBenchHParams(
    config={"model_type": "gpt2"}, vocabulary=50_257, rank=16, dtype="bfloat16", steps=8, rows=10, words=25,
    single=6, at_once=(16, 32, 64),
)  # fmt: skip

ONE_BILLION = replace(  # 0.9 billion parameters
    GPT2_SMALL, config={"model_type": "gpt2", "n_layer": 16, "n_head": 16, "n_embd": 2_048}, single=3, at_once=(16, 32)
)


class DrawnUsers:
    """Users of equal numbers of records, all of the longest length, of random words."""

    def __init__(self, users: int, hparams: LoraBenchHParams) -> None:
        self._users, self._hparams, self.layout = users, hparams, hparams.layout

    def __len__(self) -> int:
        return self._users

    def __getitem__(self, user: int) -> Records:
        hparams = self._hparams
        records = hparams.steps * hparams.rows
        words = stream(0, "bench lora", user).integers(1, self.layout.last_word + 1, (records, hparams.words))
        return Records.from_lists(words.tolist())


def bench_lora(hparams: LoraBenchHParams, device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yield users per second one at a time, then in blocks, of rounds after a first one.

    Yields:
        ``at_once`` (1 first), ``users_per_second``, ``ratio`` to one at a time, ``peak_gigabytes`` of a GPU's memory,
        else NaN.
    """
    alone = _rate(1, hparams, device)
    yield {"at_once": 1, "ratio": 1.0, **alone}
    for at_once in hparams.at_once:
        measured = _rate(at_once, hparams, device)
        yield {"at_once": at_once, "ratio": measured["users_per_second"] / alone["users_per_second"], **measured}


def _rate(at_once: int, hparams: LoraBenchHParams, device: str) -> dict[str, float]:
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = build(hparams.vocabulary, hparams.model).initialize(0).to(device)
    start = {name: value.detach().clone() for name, value in model.trainable.items()}
    train = _alone(model, hparams) if at_once == 1 else _blocks(model, start, hparams, at_once)
    users = DrawnUsers(hparams.single if at_once == 1 else 2 * at_once, hparams)
    cohort, seconds = range(len(users)), []
    for chosen in (cohort[: max(1, min(at_once, len(users)))], cohort):  # the first round compiles and allocates
        began = time.perf_counter()
        train(start, users, chosen, 0, 0, CLIP)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else float("nan")
    return {"users_per_second": len(users) / seconds[-1], "peak_gigabytes": peak}


def _alone(model: Any, hparams: LoraBenchHParams) -> Callable[..., object]:
    from flsim.algorithms.rounds import LocalEngine

    return LocalEngine(model, hparams.local).train


def _blocks(
    model: Any, start: dict[str, torch.Tensor], hparams: LoraBenchHParams, at_once: int
) -> Callable[..., object]:
    def trainer(users: int) -> BlockTrainer:
        return BlockTrainer(model, start, hparams.local, hparams.layout, users)

    return CohortEngine(start, hparams.layout, hparams.local, at_once, trainer=trainer).train


def unit_of(hparams: LoraBenchHParams) -> str:
    """Return what is measured, in words."""
    kind, tokens = hparams.config["model_type"], hparams.rows * hparams.words
    sizes = ", ".join(f"{name} {value}" for name, value in hparams.config.items() if name != "model_type")
    return (
        f"one user of {hparams.steps} steps of {tokens} tokens; {kind}{' of ' * bool(sizes)}{sizes}, "
        f"V {hparams.vocabulary:,}, base in {hparams.dtype}, LoRA of rank {hparams.rank}"
    )


def describe(rows: Sequence[dict[str, Any]], hparams: LoraBenchHParams) -> str:
    """Return the results as text."""
    lines = [unit_of(hparams), "at once   users/s   ratio"]
    return "\n".join(lines + [f"{r['at_once']:>7} {r['users_per_second']:>9.2f} {r['ratio']:>7.2f}" for r in rows])
