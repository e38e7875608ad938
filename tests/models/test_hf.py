"""Tests compare Hugging Face models in flsim with plain torch, transformers and peft."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from populations import InMemory
from tiny_bases import GPT2, LLAMA, norms_in_float64
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from flsim.algorithms.fedavg import init, train_users
from flsim.algorithms.summation import RoundRequest
from flsim.base import machine
from flsim.base.errors import InputError
from flsim.data.records import Layout, Records, batch
from flsim.measures.memorization.score import Template, rows_at_once
from flsim.measures.memorization.search import beam_searches
from flsim.models.architectures import ModelHParams, build, restore, weights_of
from flsim.models.hf import CLOSED, HuggingFaceModel, base_of
from flsim.models.language_model import LoraHParams, Params
from flsim.privacy.ledger import PrivacyHParams
from flsim.training.central.hparams import CentralHParams, private_step
from flsim.training.central.training import CentralTask
from flsim.training.own_model import refuse_unfit
from flsim.training.update import LocalHParams

LAYOUT = Layout(50, 12)
BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
LORA = LoraHParams(rank=4, alpha=8)
TUNED = pytest.mark.parametrize("lora", [None, LORA, LoraHParams(rank=2, freeze_a=True)], ids=["full", "lora", "ffa"])


def hparams_of(config: dict[str, object], lora: LoraHParams | None = LORA, **more: object) -> ModelHParams:
    return ModelHParams(architecture="hf", config=config, lora=lora, **more)  # type: ignore[arg-type]


def made(hparams: ModelHParams, seed: int = 3) -> HuggingFaceModel:
    """Return a model whose adapters are not zero."""
    model = build(LAYOUT.vocabulary_size, hparams).initialize(seed)
    assert isinstance(model, HuggingFaceModel)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.trainable.values():
            value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return model


def tokens_of(rows: int = 5, length: int = 8) -> Tensor:
    return torch.randint(1, LAYOUT.vocabulary_size, (rows, length), generator=torch.Generator().manual_seed(0))


def params_of(model: HuggingFaceModel) -> Params:
    return {name: value.detach().clone() for name, value in model.trainable.items()}


def plain_base(config: dict[str, object], values: Params) -> Any:
    """Return the base from transformers with these weights."""
    named = {name: value for name, value in config.items() if name != "model_type"}
    off = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) if config is GPT2 else {}
    made = AutoConfig.for_model(str(config["model_type"]), vocab_size=LAYOUT.vocabulary_size, **named, **off)
    network = AutoModelForCausalLM.from_config(made)
    network.load_state_dict(values)
    return network


def user(records: int = 6, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LAYOUT.record_words + 1, records)
    return Records.from_lists([rng.integers(1, LAYOUT.last_word + 1, length).tolist() for length in lengths])


def users_of(*records: Records) -> InMemory:
    return InMemory(LAYOUT, [[record.tolist() for record in each] for each in records])


@BOTH
@TUNED
def test_a_model_equals_transformers_and_its_steps_equal_complete_reading(
    config: dict[str, object], lora: LoraHParams | None
) -> None:
    model, tokens = made(hparams_of(config, lora)), tokens_of()
    with torch.no_grad():
        logits = model(tokens)
        assert torch.equal(logits, model.network(input_ids=tokens, use_cache=False).logits)
        real = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        torch.testing.assert_close(model.logits_at(tokens, real), logits[real])
        rows = torch.tensor([4, 0, 0, 2])
        state, first = model.start(tokens[:, :3])
        before = [part.clone() for part in state]
        after, second = model.step(tuple(part[rows] for part in state), tokens[rows, 3])
        _, third = model.step(after, tokens[rows, 4])
    scores = logits.log_softmax(-1)
    torch.testing.assert_close(first, scores[:, 2])
    torch.testing.assert_close(second, scores[rows, 3])
    torch.testing.assert_close(third, scores[rows, 4])
    assert all(torch.equal(part, old) for part, old in zip(state, before, strict=True))
    copy = restore(params_of(model), model.hparams, LAYOUT.vocabulary_size)
    assert torch.equal(copy(tokens), logits)
    assert copy.frozen_digest == model.frozen_digest
    assert (model.frozen_digest == "") == (lora is None)
    assert weights_of(LAYOUT.vocabulary_size, model.hparams) == sum(value.numel() for value in model.trainable.values())


@BOTH
def test_a_model_with_initial_adapters_equals_the_base_bit_for_bit(config: dict[str, object]) -> None:
    """B is initially zero: Hu et al. (2022), section 4.1."""
    hparams, tokens = hparams_of(config), tokens_of()
    model = build(LAYOUT.vocabulary_size, hparams).initialize(5)
    plain = plain_base(config, base_of(hparams, LAYOUT.vocabulary_size)).eval()
    assert torch.equal(model(tokens), plain(tokens).logits)
    assert all(bool(value.any()) == (".lora_A." in name) for name, value in model.trainable.items())
    assert model.frozen_digest == build(LAYOUT.vocabulary_size, hparams).initialize(6).frozen_digest
    first, again, other = (init(LAYOUT.vocabulary_size, hparams, seed).params for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(*(values[next(iter(first))] for values in (first, other)))


def peft_of(config: dict[str, object], start: Params) -> tuple[Any, list[Tensor]]:
    """Return the base with adapters from peft, and its trained weights in the order of `start`."""
    dtype = next(iter(start.values())).dtype
    base = {name: value.to(dtype) for name, value in base_of(hparams_of(config), LAYOUT.vocabulary_size).items()}
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", fan_in_fan_out=config is GPT2)
    peft = get_peft_model(plain_base(config, base).to(dtype), settings)
    peft.load_state_dict({name.replace("network", "base_model.model"): value for name, value in start.items()}, False)
    return peft, [value for value in peft.parameters() if value.requires_grad]


@BOTH
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_the_steps_of_a_user_equal_ten_lines_of_torch_and_peft(
    config: dict[str, object], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float64:
        norms_in_float64(monkeypatch)
    hparams, local = hparams_of(config), LocalHParams(batch_size=6, epochs=3, learning_rate=0.5)
    start = {name: value.to(dtype) for name, value in params_of(made(hparams)).items()}
    model, records = restore(start, hparams, LAYOUT.vocabulary_size), user()
    before = model.frozen_digest
    updates = train_users(RoundRequest(0, 0, np.array([0]), start), users_of(records), model, local, seed=0).delta

    peft, trained = peft_of(config, start)
    optimizer, read = torch.optim.SGD(trained, lr=0.5), batch(records, np.arange(6), LAYOUT)
    inputs, targets = torch.from_numpy(read.inputs), torch.from_numpy(read.targets)
    for _ in range(3):
        cross_entropy(peft(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for (name, update), value in zip(updates.items(), trained, strict=True):
        torch.testing.assert_close(update / 6, (value.detach() - start[name]).double(), rtol=0, atol=tolerance)
    assert float(sum(update.abs().sum() for update in updates.values())) > 0.1
    assert model.frozen_digest == before


@BOTH
def test_a_step_of_dp_sgd_equals_the_sum_of_clipped_gradients_of_records(
    config: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected steps follow Abadi et al. (2016), Algorithm 1, without noise; opacus adds 1e-6 to norms in divisors."""
    norms_in_float64(monkeypatch)
    hparams, read = hparams_of(config), batch(user(), np.arange(6), LAYOUT)
    start = {name: value.double() for name, value in params_of(made(hparams)).items()}
    inputs, targets = torch.from_numpy(read.inputs), torch.from_numpy(read.targets)
    peft, trained = peft_of(config, start)
    losses = [cross_entropy(peft(inputs[[row]]).logits[0], targets[row], ignore_index=0) for row in range(6)]
    gradients = [torch.autograd.grad(loss, trained) for loss in losses]
    norms = [torch.cat([value.flatten() for value in gradient]).norm() for gradient in gradients]
    clip = float(sorted(norms)[3])
    factors = [min(1.0, clip / (float(norm) + 1e-6)) for norm in norms]

    model = restore(start, hparams, LAYOUT.vocabulary_size)
    before, optimizer = model.frozen_digest, torch.optim.SGD(model.trainable.values(), lr=1.0)
    private_step(
        model, optimizer, inputs, targets, clip=clip, noise_multiplier=0.0, expected=4, seed=0, step=0, physical_batch=4
    )
    for of_weight, (name, value) in zip(zip(*gradients, strict=True), model.trainable.items(), strict=True):
        step = sum(factor * gradient for factor, gradient in zip(factors, of_weight, strict=True)) / 4
        torch.testing.assert_close(start[name] - value.detach(), step, rtol=0, atol=1e-10)
    assert model.frozen_digest == before


def test_only_b_is_trained_by_ffa_lora() -> None:
    model = made(hparams_of(GPT2, LoraHParams(rank=2, freeze_a=True)))
    assert all(".lora_B." in name for name in model.trainable)
    a = [value for name, value in model.named_parameters() if ".lora_A." in name]
    assert a
    assert all(bool(value.any()) for value in a)
    assert max(float(value.abs().max()) for value in a) <= 16**-0.5  # n_embd = 16 is the smallest number of inputs


def test_ids_of_a_tokenizer_are_mapped_for_inputs_and_logits(tmp_path: Path) -> None:
    """The corpus' ids are a permutation of the base's ids; BOS, EOS and PAD have the same row, as in GPT-2."""
    rows = 47
    words = np.random.default_rng(0).permutation(rows)[: rows - 1]
    eos = ({*range(rows)} - {*words.tolist()}).pop()
    ids = np.array([eos, *words, eos, eos, eos])  # PAD, words, OOV, BOS, EOS
    ids.astype("<i8").tofile(tmp_path / "tokens.i64")
    hparams = hparams_of({**GPT2, "vocab_size": rows}, tokens=str(tmp_path / "tokens.i64"))
    model = made(hparams)
    tokens = torch.tensor([[48, 3, 7, 46], [48, 9, 1, 2]])  # BOS first
    logits = model(tokens)
    of_base = model.network(torch.from_numpy(ids)[tokens]).logits
    assert logits.shape == (2, 4, 50)
    for place, row in enumerate(ids.tolist()):
        expected = torch.full_like(of_base[..., 0], CLOSED) if place in (0, 47, 48) else of_base[..., row]
        assert torch.equal(logits[..., place], expected)
    perplexity = cross_entropy(logits[:, 0], tokens[:, 1])
    torch.testing.assert_close(perplexity, cross_entropy(of_base[:, 0], torch.from_numpy(ids)[tokens[:, 1]]))


@pytest.mark.parametrize(
    ("hparams", "message"),
    [
        ({}, "either path, a folder, or config"),
        ({"config": {**GPT2, "attn_pdrop": 0.1}}, "config.attn_pdrop: the base has no dropout here"),
        ({"config": GPT2, "units": 8}, 'units is not of architecture "hf"'),
        ({"config": GPT2, "dtype": "bfloat16"}, 'dtype "bfloat16" is for a frozen base'),
        ({"config": GPT2, "architecture": "lstm"}, 'config is for architecture "hf", found "lstm"'),
        ({"config": GPT2, "lora": {"rank": 0}, "architecture": "hf"}, ", found a dict"),
    ],
)
def test_wrong_settings_are_refused(hparams: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        ModelHParams(**{"architecture": "hf", **hparams})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: hparams_of({**GPT2, "n_layers": 2}), "gpt2 has no setting n_layers; correct its name"),
        (lambda _: hparams_of(GPT2, LoraHParams(targets=("q_proj",))), "['q_proj']: match no layer of the base"),
        (lambda _: hparams_of({**GPT2, "n_positions": 11}), "reads 11 tokens at most, and records of the corpus"),
        (lambda _: hparams_of({**GPT2, "vocab_size": 60}), "the base has 60 token ids, and the corpus has 50"),
        (lambda folder: of_folder(folder / "none"), "no folder of a model (it has no config.json)"),
        (lambda folder: of_folder(pickled(folder)), "holds only pytorch_model.bin, a pickle"),
    ],
)
def test_bases_that_do_not_fit_are_refused(tmp_path: Path, make: Callable[[Path], ModelHParams], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        refuse_unfit(make(tmp_path), LAYOUT, 0)
    assert "\n" not in str(refused.value)


def of_folder(folder: Path, **more: object) -> ModelHParams:
    return ModelHParams(architecture="hf", path=str(folder), lora=LORA, **more)  # type: ignore[arg-type]


def pickled(folder: Path) -> Path:
    """Write the weights as a pickle, like old releases, and return the folder."""
    plain = plain_base(GPT2, base_of(hparams_of(GPT2), LAYOUT.vocabulary_size))
    plain.config.save_pretrained(folder)
    torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    return folder


def saved(folder: Path, config: dict[str, object] = GPT2) -> Path:
    plain = plain_base(config, base_of(hparams_of(config), LAYOUT.vocabulary_size, seed=9))
    plain.save_pretrained(folder)
    return folder


@BOTH
def test_a_model_in_a_folder_is_a_base_and_its_changes_are_refused(tmp_path: Path, config: dict[str, object]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved(tmp_path, config)).eval()
    for lora in (None, LORA):
        hparams = ModelHParams(architecture="hf", path=str(tmp_path), lora=lora)
        model = build(LAYOUT.vocabulary_size, hparams).initialize(0)
        assert torch.equal(model(tokens_of()), plain(tokens_of()).logits)
    shared = [build(LAYOUT.vocabulary_size, of_folder(tmp_path)) for _ in range(2)]
    pointers = [{value.data_ptr() for value in model.parameters() if not value.requires_grad} for model in shared]
    assert pointers[0] == pointers[1]  # one copy of the base in a process
    recorded = of_folder(tmp_path, digest=shared[0].frozen_digest)
    build(LAYOUT.vocabulary_size, recorded)
    plain_base(config, base_of(hparams_of(config), LAYOUT.vocabulary_size, seed=10)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=re.escape(f"{tmp_path}: its files changed since the run was started")):
        build(LAYOUT.vocabulary_size, recorded)


def test_a_base_in_bfloat16_has_adapters_in_float32(tmp_path: Path) -> None:
    model = made(of_folder(saved(tmp_path), dtype="bfloat16"))
    assert {value.dtype for value in model.trainable.values()} == {torch.float32}
    assert {value.dtype for value in model.parameters() if not value.requires_grad} == {torch.bfloat16}
    exact = restore(params_of(model), of_folder(tmp_path), LAYOUT.vocabulary_size)
    logits, expected = model(tokens_of()), exact(tokens_of())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)  # bfloat16 has 8 bits
    assert not torch.equal(logits, expected)


def test_a_base_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained weights need 12 bytes each in a sum of updates, and weights of the base need 2 bytes in bfloat16."""
    hparams = hparams_of(GPT2, dtype="bfloat16")
    model = build(LAYOUT.vocabulary_size, hparams)
    trained = sum(value.numel() for value in model.trainable.values())
    frozen = sum(value.numel() for value in model.parameters()) - trained
    monkeypatch.setattr(machine, "machine_memory", lambda: 12 * trained + 2 * frozen - 1)
    with pytest.raises(InputError, match=r"a model of [\d,]+ trained weights needs .*; name a smaller base"):
        refuse_unfit(hparams, LAYOUT, 0)
    monkeypatch.setattr(machine, "machine_memory", lambda: 12 * trained + 2 * frozen)
    refuse_unfit(hparams, LAYOUT, 0)


def test_dropout_of_adapters_depends_only_on_seed_round_and_user() -> None:
    hparams, users, local = hparams_of(GPT2, replace(LORA, dropout=0.5)), users_of(user(), user(seed=1)), LocalHParams()
    start, size = params_of(made(hparams)), LAYOUT.vocabulary_size

    def updates(seed: int, round_: int, *chosen: int) -> Params:
        request, model = RoundRequest(round_, 0, np.array(chosen), start), restore(start, hparams, size)
        return train_users(request, users, model, local, seed=seed).delta

    one, other, both = updates(0, 1, 0), updates(0, 1, 1), updates(0, 1, 1, 0)
    for name, value in both.items():
        torch.testing.assert_close(value, one[name] + other[name])
    assert all(torch.equal(value, one[name]) for name, value in updates(0, 1, 0).items())
    for changed in (updates(1, 1, 0), updates(0, 2, 0)):
        assert any(not torch.allclose(value, one[name]) for name, value in changed.items())
    records = SimpleNamespace(layout=LAYOUT, records=6)
    privacy = PrivacyHParams("dp", clip=0.1, noise_multiplier=1.0)
    with pytest.raises(InputError, match="DP-SGD does not support random numbers in training"):
        CentralTask(records, CentralHParams(batch_size=2), 0, privacy=privacy, model=hparams)


@BOTH
def test_beam_search_equals_generate(config: dict[str, object]) -> None:
    """`generate` has no length penalty and a fixed number of tokens. The space is all ids except 0 and the last."""
    model = made(hparams_of(config))
    prefix = tokens_of(1, 3)[0]
    template = Template((tuple(range(1, 49)),) * 4)
    tokens, scores = beam_searches(model, prefix[None], template, 5)
    written = model.network.generate(
        prefix[None], num_beams=5, num_return_sequences=5, max_new_tokens=4, min_new_tokens=4, length_penalty=0.0,
        do_sample=False, suppress_tokens=[0, 49], pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        renormalize_logits=False, attention_mask=torch.ones_like(prefix[None]),
    )  # fmt: skip
    assert torch.equal(written.sequences[:, 3:], tokens[0])
    torch.testing.assert_close(-written.sequences_scores.double(), scores[0], rtol=0, atol=1e-5)


def test_keys_and_values_limit_the_number_of_sequences_read_at_once() -> None:
    """For 3 tokens, keys and values of 2 layers with 2 heads of 8 are 192 floats; log-probabilities are 50 floats."""
    model = made(hparams_of(GPT2))
    state, log_probs = model.start(tokens_of(2, 3))
    assert rows_at_once(log_probs, state) == rows_at_once(log_probs.new_zeros(1, 2 * 2 * 2 * 8 * 3))
    assert rows_at_once(log_probs, state) < rows_at_once(log_probs)
