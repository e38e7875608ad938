"""The network of docs/models.md, in a file next to the configuration, as a user writes it."""

from pathlib import Path

from helpers import PARTITION, TINY

DOCUMENT = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
TWISTED, SECTION = (DOCUMENT.split(f"```{language}\n")[1].split("```")[0] for language in ("python", "toml"))

TINY_OWN = TINY.replace("[model]\nembedding = 8\nunits = 12\n", "")
CENTRAL = (
    PARTITION.replace("[model]\nembedding = 8\nunits = 12\n", "")
    + """
[training]
kind = "central"
batch_size = 4
learning_rate = 0.3
steps = 30
[evaluation]
every = 30
references = 200
[system]
checkpoint_every = 10
"""
)


def line_of(part: str) -> int:
    """Return the number of the first line of the file that begins with a text; lines count from 1."""
    return 1 + [line.startswith(part) for line in TWISTED.splitlines()].index(True)


def write_model(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the file, with the given replacements in its text."""
    text = TWISTED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "mine.py"
    file.write_text(text)
    return file
