"""Memory, bytes and operations of Hugging Face models, against autograd, measurements of a GPU, and sums by hand."""

import json
from pathlib import Path

import pytest
import torch
from helpers import TINY, Experiment
from tiny_bases import GPT2, LLAMA

from benchmarks.lora import GPT2_SMALL, ONE_BILLION, LoraBenchHParams
from flsim.base import machine
from flsim.base.errors import InputError
from flsim.data.corpus import Corpus
from flsim.data.records import Layout
from flsim.models import hf
from flsim.models.architectures import ModelHParams, build
from flsim.models.hf import HuggingFaceModel
from flsim.models.language_model import LoraHParams, loss_sum
from flsim.planning.measure import duration, size, table
from flsim.planning.plan import FINETUNING, finetuning_of, read_request
from flsim.runs.config import load
from flsim.runs.foresight import refuse_impossible_in
from flsim.training.own_model import H100, OPERATIONS, bytes_of_user, footprint_of
from flsim.training.update import LocalHParams

LAYOUT = Layout(200, 16)
LORA = LoraHParams(rank=4)
REPOSITORY = Path(__file__).parents[2]
MEASURED = REPOSITORY / "experiments" / "results" / "gpu-h100.json"


@pytest.mark.parametrize("config", [GPT2 | {"n_embd": 64}, LLAMA | {"hidden_size": 64, "intermediate_size": 172}])
@pytest.mark.parametrize(("lora", "dtype"), [(None, "float32"), (LORA, "float32"), (LORA, "bfloat16")])
def test_a_batch_needs_what_autograd_saves(config: dict[str, object], lora: LoraHParams | None, dtype: str) -> None:
    """Estimates are at least the saved bytes that two further records need, and at most twice these bytes."""
    hparams = ModelHParams(architecture="hf", config=config, lora=lora, dtype=dtype)  # type: ignore[arg-type]
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0).train()
    assert isinstance(model, HuggingFaceModel)
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}

    def saved(records: int) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(value: torch.Tensor) -> torch.Tensor:
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage  # keeps the address in use
            return value

        tokens = torch.arange(records * 17).reshape(records, 17) % 190 + 1
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            loss, _ = loss_sum(model, tokens[:, :-1], tokens[:, 1:])
        assert loss.requires_grad
        return sum(storage.nbytes() for address, storage in storages.items() if address not in weights)

    estimates = [bytes_of_user(model, LocalHParams(batch_size=size), LAYOUT) for size in (2, 4)]
    measured, estimated = saved(4) - saved(2), estimates[1] - estimates[0]
    assert measured <= estimated <= 2 * measured


@pytest.mark.parametrize(("name", "bench"), [("GPT-2 small", GPT2_SMALL), ("0.9 billion parameters", ONE_BILLION)])
def test_blocks_need_the_memory_that_an_h100_measured(name: str, bench: LoraBenchHParams) -> None:
    """Estimates are at least the measured peak and at most 1.4 times it; the benchmark has the words of a record."""
    measured = {figure["name"]: figure["value"] for figure in json.loads(MEASURED.read_text())["lora"]["figures"]}
    for users in bench.at_once:
        peak = 1e9 * measured[f"{name}, blocks of {users}: peak memory"]
        needs = footprint_of(bench.model, bench.layout, bench.local, gpu=1e12, at_once=users)
        assert peak <= needs.memory <= 1.4 * peak


@pytest.fixture
def llama(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Return the experiment of a small Llama in bfloat16 on two GPUs; an attempt to make its weights is an error."""

    def refused(*_: object) -> None:
        raise AssertionError("a plan makes no weights")

    monkeypatch.setattr(hf, "_load", refused)
    config = json.dumps(LLAMA | {"max_position_embeddings": 32}).replace(":", " =")
    lora = 'lora = { rank = 3, targets = ["q_proj", "v_proj"] }'
    model = f'architecture = "hf"\nconfig = {config}\ndtype = "bfloat16"\n{lora}\n'
    text = TINY.replace("embedding = 8\nunits = 12\n", model).replace("shards = 1", "shards = 2\ngpus_per_client = 1")
    experiment.config.write_text(text)
    return experiment


def test_a_plan_equals_sums_by_hand(llama: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = read_request(llama.config, llama.folder / "scratch")
    (row,) = finetuning_of(request.planned, request.train)
    users, vocabulary = request.train, request.train.layout.vocabulary_size
    layer = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16  # q, k, v and o; gate, up and down; two norms
    base = 2 * vocabulary * 16 + 2 * layer + 16  # embeddings, output layer, layers and the last norm
    assert row.trained == 2 * 2 * 3 * (16 + 16)
    assert row.base == 2 * base
    assert row.sent == 2 * row.trained * (4 + 8)
    assert row.memory == row.base + row.at_once * row.user
    tokens = 6 * (users.records // len(users)) * (users.words / users.records + 1)
    assert row.operations == pytest.approx(tokens * (4 * (base + row.trained) + 2 * row.trained))
    assert row.seconds == pytest.approx(row.operations / (2 * OPERATIONS))
    assert "TFLOP/s" in table((row,), FINETUNING)
    refused = load(llama.config, [f"system.gpus_per_client={0.9 * (row.base + row.user) / H100}"])
    with pytest.raises(InputError, match=r"training of llama LoRA r=3 with records of .* its share of a GPU has 0 GB"):
        refuse_impossible_in(refused, Corpus.open(llama.folder / "corpus"))
    refused = load(llama.config, ["system.gpus_per_client=0", "local.batch_size=4000"])
    monkeypatch.setattr(machine, "machine_memory", lambda: 10**8)
    with pytest.raises(InputError, match=r"training of llama LoRA r=3 .* this machine has 0 GB; set a smaller batch"):
        refuse_impossible_in(refused, Corpus.open(llama.folder / "corpus"))


def test_a_llama_of_7_billion_weights_with_its_vocabulary_is_planned_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are those of LLaMA 7B (Touvron et al., 2023, table 2), with 32,000 tokens."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = read_request(REPOSITORY / "experiments" / "llama.toml", tmp_path)
    (row,) = finetuning_of(request.planned, request.train)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert row.base == 2 * (2 * 32_000 * 4096 + 32 * layer + 4096)
    assert row.trained == 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert request.planned[0].config.evaluation.references == 20_000
    documented = (REPOSITORY / "docs" / "hugging-face.md").read_text()
    for quantity, value in (
        ("trained weights", f"{row.trained / 1e6:.1f} million"),
        ("base model", size(row.base)),
        ("memory of each user", size(row.user)),
        ("users at the same time", f"{row.at_once}"),
        ("memory of a process", size(row.memory)),
        ("sent in a round", size(row.sent or 0)),
        ("time of a round", duration(row.seconds or 0)),
    ):
        assert f"| {quantity} | {value} |" in documented
