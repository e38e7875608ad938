"""Parser of the documents: blocks of code, the marks above them, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {"command-line.md", "configuration.md"}  # from the commands and settings that they describe
PROGRAMS = {
    *("flsim", "make", "python", "pip", "pytest", "git", "ray", "flwr", "export", "for", "tensorboard"),
    *("curl", "grep", "jq", "tail", "docker", "kubectl", "sbatch", ".venv/bin/python"),
}
# Marks: `test_documents.py` runs the block; another test file runs it; no test runs it, for the given reason.
RUNS, RUNS_IN, NOT_RUN, WHOLE_PAGE = "runs", "runs in ", "not run: ", "not run on this page: "
SAVED_AS = "saved as "


@dataclass(frozen=True)
class Block:
    """A block of code in a document."""

    document: Path
    line: int  # number of the first line of the block; lines count from 1
    language: str  # of a fenced block; "" if the block has no language or is indented
    text: str
    mark: str  # the comment directly above the block, or the mark of the page; "" if there is none

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether readers type this block into a shell."""
        if self.language:
            return self.language == "sh"
        programs = re.findall(r"^(?:\w+=\S+ )*(\S+)", self.text, re.MULTILINE)
        return bool(programs) and (programs[0] in PROGRAMS or "flsim" in programs)


def written_documents() -> list[Path]:
    """Return the paths of the documents that are not generated."""
    pages = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED]
    return [ROOT / "README.md", *pages, ROOT / "experiments" / "README.md"]


def blocks_of(document: Path) -> list[Block]:
    """Return the blocks of code in a document, fenced or indented, in order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    page = next((mark for line in lines if (mark := _mark(line)).startswith(WHOLE_PAGE)), "")
    blocks, mark, number = [], page, 0
    while number < len(lines):
        line, start = lines[number], number
        if fence := re.fullmatch(r"( *)```(\w*|\{[\w-]+\})", line):
            number += 1
            while lines[number].strip() != "```":
                number += 1
            code = [text.removeprefix(fence[1]) for text in lines[start + 1 : number]]
            blocks.append(Block(document, start + 2, fence[2], "\n".join(code) + "\n", mark))
        elif line.startswith("    ") and not lines[number - 1].strip() and not _mark(line):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1]):
                number += 1
            code = [text.removeprefix("    ") for text in lines[start : number + 1]]
            blocks.append(Block(document, start + 1, "", "\n".join(code).rstrip() + "\n", mark))
        if line.strip():
            mark = _mark(line) or page
        number += 1
    return blocks


def _mark(line: str) -> str:
    """Return the text of a line that is an HTML comment; "" for other lines."""
    comment = re.fullmatch(r"<!-- (.*) -->", line.strip())
    return comment[1] if comment else ""


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block; without a language, only those before the first empty line."""
    text = (block.text if block.language else block.text.split("\n\n")[0]).replace("\\\n", " ")
    for name, values in re.findall(r"\bfor (\w+) in ([^;]+); do", text):
        text = re.sub(rf"\$\{{?{name}\b\}}?", values.split()[0], text)
    text = re.sub(r"\bfor \w+ in [^;]+; do|(?<![\w-])done(?![\w-])", ";", text)
    for line in text.splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        command: list[str] = []
        for word in [*reader, ";"]:
            if set(word) <= set(";|&()<>"):
                if command:
                    yield command
                command = []
            elif command or not re.match(r"\w+=", word):  # environment variables come before the command
                command.append(word)


def inline_commands(document: Path) -> Iterator[list[str]]:
    """Yield the words of each flsim command within a sentence or a table; the command may be incomplete."""
    text = re.sub(r"^( *)```.*?^\1```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`(flsim [^`]+)`", text):
        yield command.split()
