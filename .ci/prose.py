"""Check the prose of README, docs/ and code: words to replace, long sentences; in pages also numbers, tables.

In code it reads docstrings, comments, and strings of several words: messages, log lines and help texts.
`python .ci/prose.py` reads all pages and code, and prints a line for each finding; the exit code is then 1.
`python .ci/prose.py FILE...` reads only these files.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from notebooks import markdown, notebooks

ROOT = Path(__file__).parents[1]
CODE = ("flsim", "clients", "server", "experiments", "benchmarks", "deploy", ".ci")
COMMENTED = (".py", ".toml", ".sh", ".yaml", "Dockerfile")
GENERATED = {"command-line.md", "configuration.md"}
LONGEST_SENTENCE, MOST_NUMBERS, MOST_COLUMNS = 30, 2, 6
# The largest number of words of a page, code aside: of a part of the navigation, and of single pages.
OF_PART = {"Tutorials": 1000, "How-to guides": 500, "Explanation": 1200, "Reproductions": 600}
OF_PAGE = {
    **{"README.md": 700, "index.md": 250, "installation.md": 300, "first-run.md": 600, "concepts.md": 1160},
    **{"corpora.md": 800, "claims.md": 710, "models.md": 800, "canary-windows.md": 600},
    **{"other-tools.md": 500, "faq.md": 1000, "how-it-works.md": 600, "why-models-forget.md": 1200},
}
REPLACE = {
    r"(?<!, )where(?! (do|does|is|are|to)\b)": "if, when",
    r"beside(?!:)": "next to, with, in addition to",
    r"(IID|non-IID|FedAvg|SGD) less": "the difference between A and B",
    r"(is|are) left": "remain",
    r"alone": "only",
    r"(of|for) (one's own|yours|ours|your own)|one's own|own (model|code|measure)s?": "custom; your",
    r"(goes|go|went|gone) on": "continues, resumes",
    r"mended|made good": "fixed, recovered",
    r"says|said|tells|told": "prints, reports, is logged",
    r"(?<!-)whole(?!:)": "complete, entire",
    r"forth and back": "forward and backward",
    r"worlds?": "partition",
    r"(learn|learns|learned|learnt) by heart|gives? away": "memorize, reveal, extract",
    r"stands?|lies?": "is, are",
    r"(older|earlier|former) versions?|until then|used to be": "the current state only",
    r"(?<=, )as (it|its|they|their|there|these|those) (is|are|has|have|was|were)": "because",
    r"predicts? best": "has the lowest validation perplexity",
}
TO_REPLACE = re.compile(rf"\b(?:{'|'.join(REPLACE)})\b")
# What looks like a number and is a name: a year, a version, a number of a table, an interval in parentheses.
NAMES = (
    r"\([^()]*\bto\b[^()]*\)|(?:[Tt]ables?|[Ff]igures?|[Ss]ections?|[Aa]lgorithm|[Tt]heorem|[Rr]ounds?|[Ss]eeds?|Python|"
    r"version|torch|arXiv:?) ?\d[\d.]*(?:(?:,| to| and| or)+ \d[\d.]*)*|\b(?:19|20)\d\d\b|x86-64"
)


@dataclass(frozen=True)
class Text:
    """A paragraph, list item or cell of a table, without marks."""

    line: int
    text: str
    is_cell: bool = False


def texts_of(page: str) -> Iterator[Text]:
    """Yield the paragraphs and the rows of tables of a page; code and comments are omitted."""
    lines, fenced, start = page.splitlines(), False, 0
    block: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        plain = line.strip()
        if plain.startswith("```"):
            fenced = not fenced
        new = fenced or plain.startswith("```") or not plain or re.match(r"([-*:#|!<]|\d+\.) ?", plain) is not None
        if new and block:
            yield Text(start, " ".join(block))
            block = []
        if fenced or plain.startswith(("```", "<", "![")) or (line.startswith("    ") and not block):
            continue
        if plain.startswith("|"):
            cells = [_unmarked(cell) for cell in re.split(r"(?<!\\)\|", plain)[1:-1]]
            if not all(set(cell.strip()) <= set("-: ") for cell in cells):
                yield from (Text(number, cell, is_cell=True) for cell in cells)
            continue
        if plain:
            start = number if not block else start
            block.append(_unmarked(re.sub(r"^([-*:]|#+|\d+\.) ", "", plain)))


def texts_in_code(name: str, source: str) -> Iterator[Text]:
    """Yield the paragraphs of docstrings, the strings of several words, and the comments of a file."""
    rows = source.splitlines()
    lines = list(rows)
    for node, text in _strings(ast.parse(source)) if name.endswith(".py") else ():
        if isinstance(node, ast.Expr) or "\n" in text:
            yield from (Text(node.lineno + part.line - 1, part.text) for part in texts_of(_page_of(text)))
        elif len(re.findall(r"\b[a-z]+\b(?!,)", text)) > 3 and not rows[node.lineno - 1][node.col_offset :].startswith(
            "r"
        ):
            yield Text(node.lineno, _unmarked(text))
        lines[node.lineno : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno)
    comments, is_after_code = [], False
    for line in lines:
        found = re.search(r"(^|\s)\s*# (.*)", line)
        follows = found is not None and found.start() > 0
        text = "" if found is None or found[2].startswith(" ") else found[2]  # indented: a command
        comments.append("- " + text if text and (follows or is_after_code) else text)
        is_after_code = follows
    yield from texts_of("\n".join(comments))


def _strings(tree: ast.Module) -> Iterator[tuple[ast.Expr | ast.Constant | ast.JoinedStr, str]]:
    """Yield each string of a module, with the names of its fields as VALUE; a docstring comes as its statement."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        string = node.value if isinstance(node, ast.Expr) else node
        if isinstance(string, ast.JoinedStr):
            parts.update(id(part) for part in string.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in string.values)
        elif isinstance(string, ast.Attribute) and string.attr == "split":
            parts.add(id(string.value))  # a list of words
            continue
        elif isinstance(string, ast.Constant) and isinstance(string.value, str) and id(string) not in parts:
            text = string.value
            parts.add(id(string))
        else:
            continue
        yield node if isinstance(node, ast.Expr) else string, text


def _page_of(docstring: str) -> str:
    """Return a docstring as a page: without code; each described name and each row of a table is a list item."""
    lines, is_code, before = [], False, ""
    for line in inspect.cleandoc(docstring).splitlines():
        is_item = re.match(r"    \*{0,2}\w+(, \w+)*: | {9}|.*\S {2}", line)
        starts_code = line.strip().startswith(">>>") or (line.startswith("    ") and not before and not is_item)
        is_code = starts_code or (is_code and line.strip() != "")
        before = "" if is_code else "- " + line.strip() if is_item else line.strip()
        lines.append(before)
    return "\n".join(lines)


def _unmarked(text: str) -> str:
    text = re.sub(r"`+[^`]*`+", "CODE", text)
    text = re.sub(r"\]\([^)]*\)|[\[\]]|<[^>]*>", "", text)
    return text.replace("**", "").replace("\\|", "")


def sentences_of(text: str, is_page: bool = True) -> list[str]:
    """Split at the ends of sentences; an abbreviation such as "e.g." or "et al." ends none, ":" and ";" in code do."""
    return re.split(
        ("" if is_page else r"[;:]\s+|") + r"(?<!e\.g\.)(?<!i\.e\.)(?<! al\.)(?<=[.!?:])\**\s+(?=[A-Z*(\"]|flsim)", text
    )


def findings(page: Path, budget: int | None) -> Iterator[str]:
    """Yield a line for each thing to change in a page."""
    text = page.read_text(encoding="utf-8")
    yield from findings_in(page, markdown(text) if page.suffix == ".ipynb" else text, budget)


def findings_in(page: Path, text: str, budget: int | None) -> Iterator[str]:
    """Yield a line for each thing to change in the text of a page or a file of code."""
    name, words, is_page = page.relative_to(ROOT), 0, page.suffix in (".md", ".ipynb")
    for part in texts_of(text) if is_page else texts_in_code(page.name, text):
        words += len(part.text.split())
        for found in TO_REPLACE.finditer(part.text):
            instead = next(new for old, new in REPLACE.items() if re.search(rf"\b(?:{old})\b", found[0]))
            yield f"{name}:{part.line}: {found[0]!r}: write {instead}"
        for sentence in sentences_of(part.text, is_page):
            if (
                length := len([word for word in sentence.split() if is_page or word[1:2].isalpha()])
            ) > LONGEST_SENTENCE:
                yield f"{name}:{part.line}: {length} words in a sentence: {sentence[:60]}..."
            numbers = re.findall(r"(?<![\w.-])\d[\d,.]*", re.sub(NAMES, "", sentence))
            if len(numbers) > MOST_NUMBERS and is_page and not part.is_cell:
                yield f"{name}:{part.line}: {len(numbers)} numbers in a sentence: {sentence[:60]}..."
    if not is_page:
        return
    outside = re.sub(r"(?ms)^```.*?^```", lambda block: "\n" * block[0].count("\n"), text)  # of code
    for number, line in enumerate(outside.splitlines(), 1):
        if re.fullmatch(r"(\|[-: ]+)+\|", line) and line.count("|") > MOST_COLUMNS + 1:
            yield f"{name}:{number}: {line.count('|') - 1} columns in a table"
    if budget and words > budget:
        yield f"{name}:1: {words} words, more than {budget}"


def budgets() -> dict[str, int]:
    """Return the largest number of words by page, which the part of the navigation decides."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    parts = re.findall(r":caption: (.+)\n\n((?:.+\n)+?)```", index)
    pages = {page: OF_PART[part] for part, body in parts if part in OF_PART for page in re.findall(r"<(.+)>", body)}
    return pages | OF_PAGE


def main(names: list[str]) -> int:
    written = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED]
    code = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*")) if path.name.endswith(COMMENTED)]
    every = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written, *notebooks(), *code]
    pages = [Path(name).resolve() for name in names] or every
    limits = budgets()
    found = [line for page in pages for line in findings(page, limits.get(page.name))]
    print("\n".join(found) or f"prose: {len(pages)} files, nothing to change")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
