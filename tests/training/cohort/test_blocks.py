"""Tests of LoRA adapters of many users trained at once, against one user at a time in plain PyTorch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_bases import GPT2, LLAMA, norms_in_float64

from flsim.algorithms.rounds import LocalEngine, engine_of
from flsim.data.records import Layout, Records
from flsim.models.architectures import ModelHParams, build, restore
from flsim.models.language_model import LoraHParams, Params
from flsim.training.cohort.engine import CohortEngine
from flsim.training.update import LocalHParams

LAYOUT = Layout(50, 12)
LORA = LoraHParams(rank=3, alpha=6)


class SevenUsers:
    """Users with unequal numbers of records; the third user has none."""

    layout = LAYOUT

    def __len__(self) -> int:
        return 7

    def __getitem__(self, user: int) -> Records:
        rng = np.random.default_rng(user)
        lengths = rng.integers(1, 13, 0 if user == 2 else 1 + 2 * user)
        return Records.from_lists([rng.integers(1, 47, length).tolist() for length in lengths])


def start_of(hparams: ModelHParams, dtype: torch.dtype) -> Params:
    """Return parameters in which the matrices B are not zero."""
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0)
    generator = torch.Generator().manual_seed(0)
    moved = {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in model.trainable.items()}
    return {name: (value.detach() + moved[name]).to(dtype) for name, value in model.trainable.items()}


@pytest.mark.parametrize(
    ("local", "clip"),
    [
        (LocalHParams(batch_size=3, learning_rate=0.5, epochs=2, max_records=7), 0.05),
        (LocalHParams(batch_size=4, learning_rate=0.1, optimizer="momentum", epochs=2), None),
        (LocalHParams(batch_size=4, learning_rate=0.01, optimizer="adam"), 0.05),
        (LocalHParams(batch_size=4, learning_rate=0.5, gradient_clip=0.05, proximal=0.3), None),
    ],
    ids=["max records", "momentum", "adam", "clip and proximal"],
)
def test_blocks_equal_one_user_after_another(local: LocalHParams, clip: float | None) -> None:
    compared(ModelHParams(architecture="hf", config=GPT2, lora=LORA), local, clip, torch.float64, 1e-10)


def test_blocks_of_llama_and_of_ffa_lora_equal_one_user_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    norms_in_float64(monkeypatch)
    local = LocalHParams(batch_size=4, learning_rate=0.5)
    compared(ModelHParams(architecture="hf", config=LLAMA, lora=LORA), local, 0.05, torch.float64, 1e-10)
    ffa = replace(LORA, freeze_a=True)
    compared(ModelHParams(architecture="hf", config=GPT2, lora=ffa), local, None, torch.float64, 1e-10)
    compared(ModelHParams(architecture="hf", config=GPT2, lora=LORA), local, None, torch.float32, 2e-6)


class WithoutAnswers(SevenUsers):
    """Users who also have records of the full length that are only prompts."""

    layout = replace(LAYOUT, prompts=True)

    def __getitem__(self, user: int) -> Records:
        records = super().__getitem__(user)
        prompts, unanswered = np.diff(records.offsets) // 2, len(records) // 2
        full = Records.from_lists([[1 + user] * LAYOUT.record_words for _ in range(unanswered)])
        rest = Records.from_lists([record.tolist() for record in records])
        joined = Records.joined([full, rest])
        return replace(joined, prompts=np.concatenate([np.full(unanswered, LAYOUT.record_words), prompts]))


def test_steps_over_prompts_without_answers_have_no_gradient() -> None:
    hparams = ModelHParams(architecture="hf", config=GPT2, lora=LORA)
    local = LocalHParams(batch_size=1, learning_rate=0.1, optimizer="momentum", gradient_clip=1.0)
    compared(hparams, local, None, torch.float64, 1e-10, WithoutAnswers())


def compared(
    hparams: ModelHParams, local: LocalHParams, clip: float | None, dtype: torch.dtype, exact: float,
    users: SevenUsers = SevenUsers(),  # noqa: B008 (it has no state)
) -> None:  # fmt: skip
    start = start_of(hparams, dtype)
    size, cohort = LAYOUT.vocabulary_size, range(len(users))
    oracle = LocalEngine(restore(start, hparams, size), local).train(start, users, cohort, 1, 2, clip)
    engine = engine_of("cohort", restore(start, hparams, size), LAYOUT, local, 3)
    assert isinstance(engine, CohortEngine)
    for _ in range(2):  # the second time, the engine reuses its buffers
        total = engine.train(start, users, cohort, 1, 2, clip)
        for name, value in oracle.delta.items():
            torch.testing.assert_close(total.delta[name], value, rtol=0, atol=exact * max(1, len(users)))
        counts = {key: pytest.approx(value, rel=1e-6) for key, value in vars(oracle.counts).items()}
        assert vars(total.counts) == counts
    assert max(float(value.abs().max()) for value in oracle.delta.values()) > 1e-3


def test_users_train_one_after_another_if_blocks_are_not_faster_or_not_supported(tmp_path: Path) -> None:
    """Users do so for many positions per step, without LoRA, with LoRA dropout, or with an optimizer without kernel."""
    (tmp_path / "mine.py").write_text("from torch.optim import Adagrad\n")
    hparams = ModelHParams(architecture="hf", config=GPT2, lora=LORA)

    def engine_for(hparams: ModelHParams, batch_size: int, layout: Layout = LAYOUT, **local: object) -> object:
        model = build(layout.vocabulary_size, hparams).initialize(0)
        return engine_of("cohort", model, layout, LocalHParams(batch_size=batch_size, **local))  # type: ignore[arg-type]

    small, large = engine_for(hparams, 8), engine_for(hparams, 8, Layout(50, 26))  # 48 and 104 positions per step
    assert isinstance(small, CohortEngine)
    assert small.micro_cohort == 400 // (8 * 6)
    assert isinstance(large, LocalEngine)
    for other in (replace(hparams, lora=None), replace(hparams, lora=replace(LORA, dropout=0.1))):
        assert isinstance(engine_for(other, 8), LocalEngine)
    assert isinstance(engine_for(hparams, 8, optimizer=f"{tmp_path}/mine.py:Adagrad"), LocalEngine)
