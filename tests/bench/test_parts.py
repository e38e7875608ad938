"""The benchmark of the parts of a user's training: each part is there, and together they are the whole."""

import time

import pytest

from flsim.bench.parts import REST, Clock, bench_parts, describe
from flsim.models.hparams import ModelHParams

PARTS = {
    "conversions", "gates' inputs", "recurrence, forth", "logits", "softmax and loss", "gradient by outputs",
    "recurrence, back", "gradient by inputs", "gradient by other weights", "gradient by the embedding", REST,
}  # fmt: skip


def test_a_part_is_without_the_parts_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock()
    with clock.part("whole"):
        for _ in range(2):
            with clock.part("inner"):
                pass
    assert clock.seconds == {"inner": 2.0 + 5.0, "whole": 10.0 - 7.0}


def test_every_part_has_a_line() -> None:
    parts = bench_parts(60, ModelHParams(3, 5), words=40, repeats=2)
    assert {*parts} == {"float32", "bf16"}
    assert all({*of_side} == PARTS and min(of_side.values()) > 0 for of_side in parts.values())
    assert len(describe(parts).splitlines()) == len(PARTS) + 2
