"""Tests that products in bfloat16, and updates from them, are exact up to rounding, and of the choice of products."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stacking import assert_within, model_of, random_population, relative_error, start_of
from training_oracle import train_cohort

from flsim.algorithms.rounds import engine_of
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.training.cohort import gradient as gradient_module
from flsim.training.cohort import kernels as products_module
from flsim.training.cohort.engine import CohortEngine
from flsim.training.cohort.gradient import packed_batches, packed_model
from flsim.training.cohort.kernels import OneDNNProducts, Products, RoundedProducts, products_for
from flsim.training.cohort.packing import steps_of
from flsim.training.update import LocalHParams

WAYS = {"amx_bf16": OneDNNProducts, "avx512_bf16": RoundedProducts}
UNIT = 2**-8  # largest relative error of rounding to 8 significant bits
LARGE, SMALL = ({"embedding": torch.empty(rows, 96)} for rows in (10_000, 600))
HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))
ZEN_4 = {"cpu_name": "AMD EPYC", "avx512_f": True, "avx512_bf16": True}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Report only this instruction set as the processor's; on a processor without AMX, oneDNN computes in float32."""
    name: str = request.param
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {name: True})
    return name


@pytest.mark.parametrize("make", WAYS.values())
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 40), st.integers(0, 1000))
def test_a_product_stays_within_the_rounding_of_its_operands(
    make: type[Products], rows: int, inner: int, columns: int, seed: int
) -> None:
    """Two operands and the stored product each have a relative error of at most 2^-8, to first order."""
    random = torch.Generator().manual_seed(seed)
    left, right, bias, before = (
        torch.randn(*shape, generator=random)
        for shape in ((rows, inner), (inner, columns), (columns,), (rows, columns))
    )
    way = make()
    low_left, low_right = way.operand("left", left), way.operand("right", right)
    exact = left.double() @ right.double()
    bound = 3.1 * UNIT * (left.double().abs() @ right.double().abs()) + 1e-5  # 0.1 for higher orders
    multiplied = way.multiply(low_left, low_right, torch.empty(rows, columns))
    biased = way.multiply(low_left, low_right, torch.empty(rows, columns), bias)
    added = before.clone()
    way.add(low_left, low_right, -0.5, added)
    assert bool(((multiplied - exact).abs() <= bound).all())
    assert bool(((biased - exact - bias).abs() <= bound).all())
    assert bool(((added - before + 0.5 * exact).abs() <= bound).all())


@pytest.mark.skipif(HAS_AMX, reason="this processor has AMX, by which oneDNN rounds operands to bfloat16")
@given(st.integers(1, 80), st.integers(1, 300), st.integers(1, 80), st.integers(0, 1000))
def test_onednn_rounds_no_operand_without_amx(rows: int, inner: int, columns: int, seed: int) -> None:
    """In any order, the error of a sum of n float32 products is at most n 2^-24 times the sum of their magnitudes."""
    random = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rows, inner, generator=random), torch.randn(inner, columns, generator=random)
    exact, sizes = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    product = OneDNNProducts().multiply(left, right, torch.empty(rows, columns))
    assert bool(((product - exact).abs() <= 1.01 * inner * 2**-24 * sizes).all())


def test_products_of_onednn_do_not_change_other_products() -> None:
    """The setting that AMX needs applies to the process; flsim restores this setting, also after an error."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    one, other = torch.randn(40, 50), torch.randn(50, 60)
    exact = one @ other
    OneDNNProducts().multiply(one, other, torch.empty(40, 60))
    with pytest.raises(RuntimeError):
        OneDNNProducts().multiply(one, one, torch.empty(40, 60))
    assert settings.fp32_precision == before
    assert torch.equal(one @ other, exact)


def test_an_update_stays_within_the_rounding_of_its_products(way: str) -> None:
    """The relative error of the summed update, against the float64 oracle, is below the bound of `rounding`."""
    layout = Layout(60)
    model, population = model_of(0, layout, ModelHParams(16, 24)), random_population(4, 100, layout)
    hparams = LocalHParams(2, 16, 0.1, "momentum", 0.5, gradient_clip=0.5, proximal=0.1, precision="bf16")
    exact = train_cohort(model, population, range(4), hparams, 0, 0, 1e9)
    start = start_of(model.float())
    engine = CohortEngine(start, layout, hparams)
    total = engine.train(start, population, range(4), 0, 0, 1e9)
    assert_within(total, exact, start, "bf16", 7 * hparams.epochs)
    if way == "avx512_bf16":  # torch can compute this on each processor
        plain = CohortEngine(start, layout, replace(hparams, precision="float32"))
        in_float32 = plain.train(start, population, range(4), 0, 0, 1e9)
        assert relative_error(total.delta, exact.delta) > 10 * relative_error(in_float32.delta, exact.delta)


@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(0, 100), st.sampled_from([1, 1_200, 2_400]))
def test_neither_further_rows_nor_blocks_of_logits_change_a_step(rounding: int, seed: int, logits: int) -> None:
    """Results in float64 differ only by the order of sums, although buffers contain values of longer steps."""

    class InTiles(Products):
        def rows(self, count: int) -> int:
            return -(-count // rounding) * rounding

    layout = Layout(60)
    start, population = start_of(model_of(0, layout, ModelHParams(5, 7))), random_population(4, 20, layout, seed)
    exact, tiled = packed_model(start), packed_model(start, InTiles())
    rng = stream(seed, "test", "dropout")
    for user in (2, 3):
        steps = steps_of(population[user], layout, LocalHParams(batch_size=16), rng)
        for batch in packed_batches(steps):
            kept = torch.from_numpy(rng.integers(0, 3, (2, len(batch.inputs), 5)).astype(float))
            for model in (exact, tiled):
                model.load(start)
            for either in (batch, replace(batch, dropout_mask=(kept[0], kept[1]))):
                loss, gradient = exact.gradient(either)
                with patch.object(gradient_module, "LOGITS", logits):
                    tiled_loss, tiled_gradient = tiled.gradient(either)
                assert tiled_loss == pytest.approx(loss, rel=1e-12)
                assert relative_error(tiled_gradient, gradient) < 1e-12
                exact.descend(either, 0.5)
                with patch.object(gradient_module, "LOGITS", logits):
                    tiled.descend(either, 0.5)
                assert relative_error(tiled.weights, exact.weights) < 1e-12


@given(st.floats(-2_000, 2_000), st.integers(0, 100))
def test_logits_of_any_size_have_the_gradient_of_their_differences(added: float, seed: int) -> None:
    """In float32, exp(89) is infinite and exp(-104) is 0. The relative error of a logit is at most 2^-23."""
    layout = Layout(60)
    start = start_of(model_of(seed, layout, ModelHParams(5, 7)).float())
    near, far = packed_model(start), packed_model(start)
    far.load(start | {"output_bias": start["output_bias"] + added})
    near.load(start)
    population = random_population(4, 20, layout, seed)
    steps = steps_of(population[3], layout, LocalHParams(batch_size=16), stream(seed, "test", "logits"))
    for batch in packed_batches(steps):
        loss, gradient = near.gradient(batch)
        far_loss, far_gradient = far.gradient(batch)
        rounding = 2**-23 * (20 + 4 * abs(added))
        assert far_loss == pytest.approx(loss, rel=rounding)
        assert relative_error(far_gradient, gradient) < rounding


def test_bf16_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def on(**able: bool) -> type[Products]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
        return type(products_for("bf16", LARGE))

    products_module._say_that_float32_is_used.cache_clear()
    assert on(amx_bf16=True, avx512_bf16=True) is OneDNNProducts
    assert on(amx_bf16=False, avx512_bf16=True) is RoundedProducts
    assert capsys.readouterr().err == ""
    assert on(amx_bf16=False) is on() is Products
    assert capsys.readouterr().err.count("no instructions for bfloat16") == 1


def test_bf16_trains_as_float32_on_a_processor_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of a small model are stacked as in float32, with the same bits; with bfloat16 they are not stacked."""
    layout = Layout(12, record_words=6)
    users, model = random_population(3, 5, layout), model_of(0, layout).float()
    start = start_of(model)

    def trained(precision: Any, **able: bool) -> tuple[bool, Params]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
        engine = engine_of("cohort", model, layout, LocalHParams(batch_size=4, precision=precision))
        assert isinstance(engine, CohortEngine)
        return engine.is_stacked, engine.train(start, users, range(3), 0, 0).delta

    (stacked, expected), (also_stacked, update) = trained("float32"), trained("bf16")
    assert (stacked, also_stacked) == (True, True)
    assert all(torch.equal(update[name], expected[name]) for name in expected)
    assert not trained("bf16", avx512_bf16=True)[0]


@pytest.mark.parametrize(
    ("processor", "like", "taken", "expected"),
    [
        (ZEN_4, LARGE, True, OneDNNProducts),
        (ZEN_4, LARGE, False, Products),  # torch would not use oneDNN even if asked
        (ZEN_4, SMALL, True, Products),  # a call of oneDNN takes longer than the product
        (ZEN_4 | {"amx_bf16": True}, LARGE, True, Products),  # oneDNN would round to bfloat16
        (ZEN_4 | {"avx512_f": False}, LARGE, True, Products),  # Zen 3
        (ZEN_4 | {"cpu_name": "Intel(R) Xeon(R)"}, LARGE, True, Products),  # MKL is as fast
        ({}, LARGE, True, Products),  # a processor of another architecture
    ],
)
def test_float32_uses_the_faster_library(
    processor: dict[str, Any], like: Params, taken: bool, expected: type[Products], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    monkeypatch.setattr(products_module, "_torch_takes_onednn", lambda: taken)
    assert type(products_for("float32", like)) is expected


def test_tf32_is_refused_on_a_processor() -> None:
    with pytest.raises(InputError, match='"tf32" needs an NVIDIA GPU'):
        CohortEngine(start_of(model_of(0)), Layout(12), LocalHParams(precision="tf32"))
