"""Tests compare measurements of folders of transformers and peft with values of these libraries without flsim."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import Flsim, Trained, refusal, rows
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from flsim.canaries.elsewhere import CanarySet
from flsim.data.tokenizer import train_tokenizer
from flsim.runs.folder import Run

TEXTS = [f" {a}{b} {b}{a} {a}{c}{b}" for a in "abcdefgh" for b in "stuvw" for c in "lmno"] * 3
DRAW = ("--users", "6", "--records", "20", "--set", "insertions=[1,3]", "--set", "count=3", "--set", "controls=2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPT-2 of random weights, large enough to be far from uniform, with a custom BPE tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    train_tokenizer(iter(TEXTS), 330, folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 336, "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "initializer_range": 0.7}
    config = GPT2Config(**sizes, bos_token_id=2, eos_token_id=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def with_adapter(base: Path, folder: Path, seed: int) -> Path:
    """Write a LoRA adapter that is far from zero to a folder, and return the folder."""
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def by_transformers(model: torch.nn.Module, text: str, base: Path) -> float:
    """Return the log-perplexity of the words after the first, from BOS, without the ids of flsim."""
    from transformers import PreTrainedTokenizerFast

    ids = PreTrainedTokenizerFast(tokenizer_file=str(base / "tokenizer.json")).encode(text, add_special_tokens=False)
    assert len(ids) == 5  # a token for each word
    with torch.no_grad():
        log_probs = model.eval()(torch.tensor([[2, *ids]])).logits[0].log_softmax(-1)
    return -sum(float(log_probs[place, id_]) for place, id_ in list(enumerate(ids))[1:])


def test_log_perplexities_of_canaries_equal_those_of_transformers(base: Path, tmp_path: Path, flsim: Flsim) -> None:
    """The model's tokenizer draws canaries; the folder has checkpoints of a complete model and of an adapter."""
    planted, out = tmp_path / "planted", tmp_path / "theirs"
    code, _, err = flsim("data", "canaries", "--tokenizer", base, *DRAW, "--out", planted, "--format", "instructions")
    assert code == 0, err
    model = tmp_path / "checkpoints"
    with_adapter(base, model / "checkpoint-10", 1)
    shutil.copytree(base, model / "checkpoint-2")
    whole, other = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    loaded = {2: whole, 10: PeftModel.from_pretrained(other, model / "checkpoint-10")}
    code, _, err = flsim("evaluate", "--model", model, "--canaries", planted, "--out", out, "--references", "50")
    assert code == 0, err
    drawn = CanarySet.read(planted)
    for number, network in loaded.items():
        rows = pd.read_parquet(out / "rows" / f"round-{number:06d}.parquet")
        nats = rows[rows["metric"] == "log_perplexity"].set_index("canary")["value"]
        for canary in drawn.planting.canaries:
            text = drawn.text_of(canary)["text"]
            assert nats[canary.id] == pytest.approx(by_transformers(network, text, base), rel=1e-5)
    for line in (planted / "records.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert len(row["prompt"].split()) == 1
        assert row["completion"].startswith(" ")


def test_attacks_load_an_adapter_again(base: Path, tmp_path: Path, flsim: Flsim) -> None:
    """Attacks need no code, and their log p of all words after the first is the measured one. Changes are refused."""
    planted, out, adapter = tmp_path / "planted", tmp_path / "theirs", with_adapter(base, tmp_path / "adapter", 1)
    assert flsim("data", "canaries", "--tokenizer", base, *DRAW, "--out", planted)[0] == 0
    how = ("--canaries", planted, "--out", out, "--references", "50")
    assert flsim("evaluate", "--model", adapter, *how)[0] == 0
    nats = rows(out).query("metric == 'log_perplexity'").set_index("canary")["value"]
    code, text, err = flsim("extract", out, "--prefix", "1", "--top-k", "0", "--json")
    assert code == 0, err
    strings = pd.DataFrame(json.loads(text)["strings"]).set_index("name")
    assert (-strings["log_probability"]).to_dict() == pytest.approx(nats.to_dict(), rel=1e-5)
    code, text, err = flsim("membership", out, "--attack", "reference", "--reference", base, "--json")
    assert code == 0, err
    (row,) = json.loads(text)["runs"][0]["rows"]
    assert (row["n_in"], row["untrained_auroc"]) == (2, 0.5)  # the base minus itself is 0 for all
    with_adapter(base, adapter, 2)
    assert "not the parameters that" in refusal(flsim, "extract", out)
    shutil.rmtree(adapter)
    assert "has no model of transformers or peft; name the folder of a model" in refusal(flsim, "extract", out)


def test_rows_of_an_exported_run_equal_those_of_the_run(trained_here: Trained, tmp_path: Path, flsim: Flsim) -> None:
    """Rows, including utility, are equal for two exported checkpoints: an adapter with its base, and a merged model."""
    config = '{ model_type = "gpt2", n_layer = 1, n_head = 2, n_embd = 8, n_positions = 24 }'
    sizes = ('model.architecture="hf"', "model.embedding=96", "model.units=670", f"model.config={config}")
    run = Run.open(trained_here(*sizes, "model.lora={ rank = 2 }", "evaluation.also=[]"))
    for number, options in (("2", []), ("4", ["--merge"])):
        where = ("--round", number, "--out", tmp_path / "weights" / f"round-{number}")
        code, _, err = flsim("export", run.path, *where, *options)
        assert code == 0, err
    listed = [{"id": canary.id, "tokens": list(canary.tokens), "copies": 1} for canary in run.canaries]
    (tmp_path / "canaries.json").write_text(json.dumps(listed))
    how = ("--canaries", tmp_path / "canaries.json", "--corpus", run.config.data.corpus, "--references", "200")
    code, _, err = flsim("evaluate", "--model", tmp_path / "weights", *how, "--out", tmp_path / "theirs")
    assert code == 0, err
    pd.testing.assert_frame_equal(rows(tmp_path / "theirs"), rows(run.path), check_exact=False, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pickle", "holds only pytorch_model.bin, a pickle, which could execute code"),
        ("base", "is not a folder; write the folder of the base there"),
        ("part", "peft refuses the adapter (Found missing adapter keys while loading the checkpoint"),
    ],
)
def test_unusable_folders_are_refused(base: Path, tmp_path: Path, flsim: Flsim, change: str, message: str) -> None:
    model = shutil.copytree(base, tmp_path / "model")
    if change == "pickle":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    elif change == "part":
        adapter = with_adapter(base, model, 0) / "adapter_model.safetensors"
        _, *rest = sorted(load_file(adapter).items())
        save_file(dict(rest), adapter)
    else:
        with_adapter(base, model, 0)
        about = json.loads((model / "adapter_config.json").read_text())
        (model / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": "somebody/gone"}))
    assert flsim("data", "canaries", "--tokenizer", base, *DRAW, "--out", tmp_path / "planted")[0] == 0
    code, _, err = flsim("evaluate", "--model", model, "--canaries", tmp_path / "planted", "--references", "50")
    assert (code, message in " ".join(err.split())) == (2, True), err
