"""A network of a user's own, as one writes it: a GRU with a twist, in a file beside the configuration."""

from pathlib import Path

TWISTED = """
import torch
from torch import Tensor, nn

from flsim.base.rng import stream
from flsim.models.language_model import ModelSettings, TrainableModel


class TwistedGRU(TrainableModel):
    \"\"\"Reads words through a frozen rotation; scores them by the same, tied, embeddings, times a buffer.\"\"\"

    def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        size = hparams.embedding
        twist = stream(7, "twist").normal(0, size**-0.5, (size, size))
        self.words = nn.Embedding(vocabulary_size, size)
        self.twist = nn.Parameter(torch.from_numpy(twist).float(), requires_grad=False)
        self.cells = nn.GRU(size, size, batch_first=True)
        self.out = nn.Linear(size, vocabulary_size)
        self.out.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(float(hparams.options["scale"])))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.cells(self.words(tokens) @ self.twist)
        return self.scale * self.out(hidden)
"""
LINE = 1 + TWISTED[: TWISTED.index("        hidden, _")].count("\n")  # of the first one in forward


def write_model(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the model's file, with parts of its text replaced."""
    text = TWISTED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "mine.py"
    file.write_text(text)
    return file


def settings_of(folder: Path) -> str:
    """The section of a configuration that names it, relative to the configuration."""
    assert (folder / "mine.py").is_file()
    return '[model]\narchitecture = "mine.py:TwistedGRU"\nembedding = 8\noptions = { scale = 2.5 }\n'
