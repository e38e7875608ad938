"""Tests of loading cover weights of other trainers, folders of checkpoints, and modules with other token ids."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flsim.base.errors import InputError
from flsim.data.records import Layout
from flsim.runs.evaluate import Checked, from_forward, refuse_inconsistent
from flsim.runs.loading import checkpoints_in, load_other, read_weights

NETWORK = """
import torch
from torch import nn
from flsim import from_forward

class Net(nn.Module):
    def __init__(self, vocabulary, width=3):
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
    def forward(self, tokens):
        return self.out(self.embedding(tokens).cumsum(1))

def wrapped(vocabulary):
    return from_forward(Net(vocabulary), 5)
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NETWORK)
    return tmp_path / "net.py"


SAVERS: dict[str, Any] = {
    "plain.pt": torch.save,
    "nested.ckpt": lambda weights, path: torch.save({"epoch": 3, "state_dict": weights}, path),
    "nvflare.pt": lambda weights, path: torch.save({"model": weights, "train_conf": {}}, path),
    "parallel.pth": lambda weights, path: torch.save({f"module.{k}": v for k, v in weights.items()}, path),
    "compiled.bin": lambda weights, path: torch.save({f"_orig_mod.{k}": v for k, v in weights.items()}, path),
    "own.safetensors": save_file,
    "flower.npz": lambda weights, path: np.savez(path, *[value.numpy() for value in weights.values()]),
    "named.npz": lambda weights, path: np.savez(path, **{k: v.numpy() for k, v in reversed(weights.items())}),
}


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("factory", ["Net", "wrapped"])
def test_weights_are_read_from_files_of_other_trainers(net: Path, name: str, factory: str) -> None:
    torch.manual_seed(0)
    trained = load_other(f"{net}:Net", {"vocabulary": 7})
    SAVERS[name](trained.state_dict(), net.parent / name)
    loaded = load_other(f"{net}:{factory}", {"vocabulary": 7}, net.parent / name, context=5)
    assert all(torch.equal(loaded.module.state_dict()[key], value) for key, value in trained.state_dict().items())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a.pt", {"embedding.weight": torch.zeros(7, 3)}, "not the weights of"),
        ("a.pt", [1, 2], "has no state dict; save model.state_dict()"),
        ("a.pt", {"epoch": 3}, "has no state dict"),
        ("a.pt", None, "weights cannot be read"),
        ("a.npz", None, "weights cannot be read"),
    ],
)
def test_other_files_are_refused(net: Path, name: str, value: Any, message: str) -> None:
    path = net.parent / name
    path.write_bytes(b"PK") if value is None else torch.save(value, path)
    with pytest.raises(InputError, match=re.escape(message)):
        load_other(f"{net}:Net", {"vocabulary": 7}, path)


def test_a_pickle_of_weights_executes_nothing(tmp_path: Path) -> None:
    """`torch.load` refuses every global that weights do not need."""

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    torch.save({"weight": Attack()}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="weights cannot be read"):
        read_weights(tmp_path / "a.pt", ["weight"])
    assert not (tmp_path / "executed").exists()


def test_rounds_of_checkpoints_are_read_from_names(tmp_path: Path) -> None:
    """Names are those of files of Flower's tutorials, NVFlare and other trainers, and of folders of Hugging Face."""
    names = ["model_round_2.pth", "round-10-weights.npz", "epoch3-lr0.1.pt", "7.safetensors", "step=100.ckpt"]
    for name in (*names, "best.pt", "round-5.json", "optimizer.bin"):
        (tmp_path / name).touch()
    (tmp_path / "llama3-checkpoint-500").mkdir()
    (tmp_path / "llama3-checkpoint-500" / "model.safetensors").touch()
    (tmp_path / "logs-9").mkdir()
    found = checkpoints_in(tmp_path)
    assert [round for round, _ in found] == [2, 3, 7, 10, 100, 500]
    assert found[-1][1].name == "model.safetensors"
    assert checkpoints_in(tmp_path / "best.pt") == [(0, tmp_path / "best.pt")]
    assert checkpoints_in(tmp_path / names[0], 9) == [(9, tmp_path / names[0])]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["best.pt"], "has no checkpoint with a round in its name, such as round-10.pt; rename the files"),
        (["round-1.pt", "epoch1.pt"], "both are of round 1; move one of them away"),
        (["v2-of-10.pt"], "v2-of-10: has several numbers; name the round, as in round-10"),
    ],
)
def test_names_without_a_unique_round_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=re.escape(message)):
        checkpoints_in(tmp_path)


class Table(nn.Module):
    """A model of 9 ids whose logits for the next id depend only on the last id."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(9, 9, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits[tokens]


@pytest.mark.parametrize("layout", ["tff", "fedjax", "fedml"])
@pytest.mark.parametrize("eos", [None, 1])
def test_ids_of_a_module_are_mapped_to_words(layout: str, eos: int | None) -> None:
    """The three words of nine ids keep their probabilities, as EOS does. OOV has the sum of all other ids."""
    words, bos, ours = [7, 2, 4], 0, Layout(7, name=layout)
    module = Table()
    model = from_forward(module, 4, words, bos, eos, layout)
    checked = Checked(model, ours, "table")
    refuse_inconsistent(checked)
    tokens = torch.tensor([[ours.bos, ours.first_word + 2], [ours.bos, ours.bos]])
    _, log_probs = checked.start(tokens)
    expected = module.logits.softmax(-1)[[4, 0]]
    found = log_probs.exp()
    torch.testing.assert_close(found[:, ours.first_word : ours.last_word + 1], expected[:, words])
    others = [id_ for id_ in range(9) if id_ not in words and id_ != eos]
    torch.testing.assert_close(found[:, ours.oov], expected[:, others].sum(1))
    assert found[:, [ours.pad, ours.bos]].max() == 0
    torch.testing.assert_close(found[:, ours.eos], torch.zeros(2) if eos is None else expected[:, eos])


@pytest.mark.parametrize(
    ("words", "bos", "message"),
    [
        ([1, 1], 0, "words need different ids"),
        ([1, -1], 0, "words need different ids"),
        ([1, 2], None, "and the id of bos"),
        ([], 0, "words need different ids"),
    ],
)
def test_invalid_ids_of_words_are_refused(words: list[int], bos: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_forward(Table(), 4, words, bos)


def test_words_beyond_the_module_are_refused() -> None:
    with pytest.raises(InputError, match="words name the id 9, but the module predicts 9 ids"):
        Checked(from_forward(Table(), 4, [9], 0), Layout(5), "table").start(torch.tensor([[3]]))
