"""Complete runs that fine-tune Hugging Face models: training, measures, exports, and bases that are refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tokenizer_folders
import torch
from dumps import write_jsonl
from helpers import CENTRAL, TINY, Experiment, Trained, assert_same, final_params, final_state, killed_and_whole
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import flsim
from flsim.base.rng import shared_generators
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus
from flsim.data.records import batch
from flsim.data.tokenizer import TokenMap
from flsim.results.rows import read_run
from flsim.runs.folder import Run, newest_checkpoint, restored_model

OF_CIFG = "[model]\nembedding = 8\nunits = 12\n"
BASE = '{ model_type = "gpt2", n_layer = 2, n_head = 2, n_embd = 16, n_positions = 20 }'
LORA = f"""[model]
architecture = "hf"
config = {BASE}
[model.lora]
rank = 4
"""
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 20, "vocab_size": 40}


@pytest.fixture
def lora(experiment: Experiment) -> Experiment:
    experiment.config.write_text(TINY.replace(OF_CIFG, LORA))
    return experiment


def saved_base(folder: Path, seed: int = 0, **sizes: int) -> Path:
    with shared_generators(torch.device("cpu"), seed):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2 | sizes)).save_pretrained(folder)
    return folder


def trained(experiment: Experiment, name: str = "run", *settings: str) -> Path:
    options = [part for setting in settings for part in ("--set", setting)]
    experiment.call("run", experiment.config, "--out", name, "--in-process", *options)
    return experiment.folder / name


def rows_of(run: Path) -> pd.DataFrame:
    return read_run(run).rows


def test_a_run_sends_only_adapters_and_is_measured_over_the_space(lora: Experiment, copy_of_trained: Trained) -> None:
    run = copy_of_trained("evaluation.references=2000000", "evaluation.every=4")
    opened = Run.open(run)
    assert (opened.config.evaluation.references, opened.config.evaluation.also) == (20_000, ("space",))
    params = final_params(run)
    assert all(".lora_A." in name or ".lora_B." in name for name in params)
    inputs_and_outputs = (16 + 48) + (16 + 16) + (16 + 64) + (64 + 16)  # of c_attn, c_proj, c_fc and c_proj
    assert sum(value.numel() for value in params.values()) == 2 * 4 * inputs_and_outputs
    assert opened.setting.endswith("gpt2 LoRA r=4, b_u=6")
    lora.call("verify", "run")
    lora.call("table", "run")


@pytest.mark.parametrize("algorithm", ["fedavg", "flexlora"])
def test_a_resumed_run_has_the_same_bits(lora: Experiment, copy_of_trained: Trained, algorithm: str) -> None:
    of_algorithm = f"training.algorithm={algorithm}"
    whole = copy_of_trained(*([of_algorithm] if algorithm != "fedavg" else []))
    trained(lora, "short", of_algorithm, "training.rounds=2")
    lora.call("run", lora.config, "--out", "short", "--in-process", "--resume", "--set", of_algorithm)
    lora.call("verify", "short")
    one, other = final_params(whole), final_params(lora.folder / "short")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("merge", [False, True])
def test_an_exported_model_has_the_logits_of_the_run(lora: Experiment, copy_of_trained: Trained, merge: bool) -> None:
    run, out = copy_of_trained(), lora.folder / "exported"
    lora.call("export", "run", "--round", "4", "--out", "exported", *(["--merge"] if merge else []))
    if merge:
        exported = AutoModelForCausalLM.from_pretrained(out).eval()
    else:
        exported = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(out / "base"), out).eval()
    opened = Run.open(run)
    _, model = restored_model(opened, newest_checkpoint(run), "cpu")
    users = opened.corpus.test_users
    total, tokens = 0.0, 0
    for user in range(len(users)):
        read = batch(users[user], torch.arange(len(users[user])).numpy(), users.layout)
        inputs, targets = torch.from_numpy(read.inputs), torch.from_numpy(read.targets)
        with torch.no_grad():
            logits = exported(inputs).logits
            torch.testing.assert_close(logits, model(inputs), rtol=0, atol=1e-6)
        total += float(cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"))
        tokens += int((targets != 0).sum())
    rows = rows_of(run)
    stored = rows[(rows["round"] == 4) & (rows["metric"] == "perplexity")]["value"].item()
    assert torch.tensor(total / tokens).exp().item() == pytest.approx(stored, rel=1e-6)


def test_a_base_that_changed_is_refused_on_resume(experiment: Experiment) -> None:
    saved_base(experiment.folder / "base")
    text = LORA.replace(f"config = {BASE}", 'path = "base"')
    experiment.config.write_text(TINY.replace(OF_CIFG, text))
    run = trained(experiment, "run", "training.rounds=2")
    moved = experiment.folder / "moved"
    shutil.copytree(experiment.folder / "base", moved)
    experiment.config.write_text(experiment.config.read_text().replace('"base"', '"moved"'))
    experiment.call("run", experiment.config, "--out", "run", "--in-process", "--resume")  # the path may change
    assert final_state(run).round == 4
    saved_base(moved, seed=1)
    refused = experiment.call("run", experiment.config, "--out", "run", "--in-process", "--resume", check=False)
    assert refused.returncode == 2
    assert f"run: was started with another base than {moved}, or files of the base changed" in refused.stderr
    for command in (["evaluate", "run"], ["verify", "run"], ["export", "run", "--out", "out"]):
        refused = experiment.call(*command, check=False)
        assert refused.returncode == 2
        assert "moved: its files changed since the run was started; restore them" in refused.stderr
    assert not (experiment.folder / "out").exists()


def test_central_training_with_dp_sgd(experiment: Experiment) -> None:
    short = CENTRAL.replace("steps = 40", "steps = 8").replace("every = 20", "every = 8")
    experiment.config.write_text(short.replace(OF_CIFG, LORA))
    run = trained(experiment, "run", "privacy.mechanism=dp", "privacy.clip=0.1", "privacy.noise_multiplier=1.0")
    assert final_state(run).round == 8
    assert final_state(run).ledger.entries[0].noise_multiplier == 1
    experiment.call("verify", "run")


def test_attacks_take_the_base_as_reference(lora: Experiment, copy_of_trained: Trained) -> None:
    copy_of_trained()
    lora.call("membership", "run", "--reference", "base", "--attack", "reference", "--attack", "ez", "--attack", "wbc")
    lora.call("evaluate", "run", "--calibrate", "base")
    assert "calibrated" in " ".join(rows_of(lora.folder / "run")["metric"])
    refused = lora.call("export", "run", "--round", "3000", "--out", "out", check=False)
    assert refused.returncode == 2
    assert "no such checkpoint" in refused.stderr


@pytest.fixture
def of_tokens(cut_by_tokens: Path, tmp_path: Path) -> Experiment:
    """Return an experiment with a corpus that a tokenizer has cut, and a base with a row for each token."""
    shutil.copytree(cut_by_tokens, tmp_path, dirs_exist_ok=True)
    return Experiment(tmp_path)


@pytest.fixture(scope="module")
def cut_by_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(0)
    words = ["bas", "del", "kim", "lor", "mun", "rat", "tif", "vok"]
    posts = [(f"a{number % 12}", " ".join(rng.choice(words, rng.integers(3, 25)))) for number in range(150)]
    tokenizer = tokenizer_folders.gpt2_like(tmp_path / "tokenizer")
    how = ImportHParams(300, record_words=16, words_per_user=60, heldout=0.2, test=0.3, by="tokens")
    corpus = import_corpus([write_jsonl(tmp_path / "a.jsonl", posts)], tmp_path / "corpus", how, tokenizer=tokenizer)
    saved_base(tmp_path / "base", vocab_size=tokens_of(corpus).rows)
    settings = TINY.replace(OF_CIFG, LORA.replace(f"config = {BASE}", 'path = "base"'))
    text = settings.replace("cohort = 6", "cohort = 3").replace("count = 2", "count = 1")
    Experiment(tmp_path).config.write_text(text)
    return tmp_path


def tokens_of(corpus: Corpus) -> TokenMap:
    assert corpus.token_map is not None
    return corpus.token_map


COMMANDS = (
    "membership run --records 20 --attack gradient --attack neighbourhood",
    "extract run --records 10 --prefix 2",
    "reveal run --records 5 --references 19",
    "quantize run --bits 8 --out rounded",
    "forgetting run out --pool",
    "canaries run --written",
    "table run rounded",
    "report run out --out report.html",
)


def test_commands_measure_and_show_runs_of_a_base_with_its_tokenizer(of_tokens: Experiment) -> None:
    """All lines fit into a terminal of 80 characters."""
    settings = ["data.user_holdout=0.2", "canaries.insertions=[6]", "canaries.windows=[[0, 0.5]]"]
    edited(of_tokens.config, "p_u = [0.2]\np_e = [0.5, 1.0]\n", "")
    trained(of_tokens, "run", *settings)
    trained(of_tokens, "out", *settings, "canaries.arm=out")
    for command in COMMANDS:
        result = of_tokens.call(*command.split())
        assert all(len(line) <= 80 for line in result.stdout.splitlines()), result.stdout
        assert result.stdout or command.startswith("report")
    assert (of_tokens.folder / "report.html").stat().st_size > 10_000


def pickled(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (pickled, "base: holds only pytorch_model.bin, a pickle, which could execute code; save the model as "),
    "rows": (lambda base: saved_base(base, vocab_size=40), "the corpus does not have the 40 tokens of the base"),
    "tokenizer": (
        lambda base: shutil.copytree(tokenizer_folders.llama_like(base.parent / "llama"), base, dirs_exist_ok=True),
        "base: its tokenizer is not that of the corpus; import the corpus with --tokenizer ",
    ),
    "targets": (
        lambda base: edited(base.parent / "tiny.toml", "rank = 4", 'rank = 4\ntargets = ["q_proj"]'),
        "model.lora.targets ['q_proj']: match no layer of the base; name some of c_attn, c_fc, c_proj",
    ),
    "context": (
        lambda base: saved_base(base, vocab_size=330, n_positions=15),
        "reads 15 tokens at most, and records of the corpus have up to 16",
    ),
}


def edited(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_base_that_does_not_fit_is_refused_in_one_line(of_tokens: Experiment, wrong: str) -> None:
    """The import refuses a folder without a tokenizer: tests/data/importing/test_tokens.py."""
    change, message = WRONG[wrong]
    change(of_tokens.folder / "base")
    refused = of_tokens.call("run", of_tokens.config, "--out", "run", "--in-process", check=False)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.stderr
    assert message in refused.stderr
    assert not (of_tokens.folder / "run").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_reads_a_corpus_of_its_own_tokenizer(of_tokens: Experiment, dtype: str) -> None:
    """Perplexity equals the loss of transformers on the tokenizer's ids. In float32, all weights are trained."""
    tmp_path = of_tokens.folder
    if dtype == "float32":
        edited(of_tokens.config, "[model.lora]\nrank = 4\n", "")
    corpus = Corpus.open(tmp_path / "corpus")
    tokens = tokens_of(corpus)
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "base", dirs_exist_ok=True)
    run = trained(of_tokens, "run", f"model.dtype={dtype}")
    shutil.move(run, tmp_path / "moved")  # a run folder holds the ids of the tokens
    of_tokens.call("verify", "moved")
    of_tokens.call("quantize", "moved", "--out", "rounded", "--bits", "8")
    assert Run.open(tmp_path / "rounded").config.model.tokens == str(tmp_path / "rounded" / "tokens.i64")
    of_tokens.call("export", "moved", "--merge", "--out", "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval().float()
    users, total, count = corpus.test_users, 0.0, 0
    for user in range(len(users)):
        read = batch(users[user], np.arange(len(users[user])), users.layout)
        for inputs, targets in zip(read.inputs, read.targets, strict=True):
            ids = torch.from_numpy(tokens.ids[np.append(inputs[0], targets[targets != 0])])
            loss = merged(ids[None], labels=ids[None]).loss.item()
            total, count = total + loss * (len(ids) - 1), count + len(ids) - 1
    rows = rows_of(tmp_path / "moved")
    stored = rows[(rows["round"] == 4) & (rows["metric"] == "perplexity")]["value"].item()
    exact = 1e-5 if dtype == "float32" else 0.02
    assert np.exp(total / count) == pytest.approx(stored, rel=exact)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").encode("bas del") == [
        *tokens.ids[corpus.vocabulary.encode_text("bas del")]  # type: ignore[attr-defined]
    ]


@pytest.mark.slow
def test_a_resume_after_sigkill_under_ray_is_exact(lora: Experiment) -> None:
    private = ("privacy.mechanism=dp", "privacy.clip=0.1", "privacy.noise_multiplier=1.0")
    of_training = ("training.rounds=12", "local.optimizer=adam", "evaluation.every=6")
    assert_same(*killed_and_whole(lora, *of_training, *private))


def test_a_simulation_has_the_bits_of_a_run(lora: Experiment, copy_of_trained: Trained) -> None:
    run = copy_of_trained()
    opened = Run.open(run).federated
    planted = flsim.plant(lora.folder / "corpus", opened.canaries, seed=opened.seed)
    model = flsim.Model(architecture="hf", config=opened.model.config, lora=flsim.Lora(rank=4))
    algorithm = flsim.FedAvg(cohort=6, local=opened.local, shards=1)
    *_, state = flsim.simulate(planted, model, algorithm, 4)
    params = final_params(run)
    assert state.params.keys() == params.keys()
    assert all(torch.equal(value, params[name]) for name, value in state.params.items())
