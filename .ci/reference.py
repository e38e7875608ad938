"""Write docs/command-line.md and docs/configuration.md, the pages that are made from the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from flsim.cli import app
from flsim.cli.options import PANELS
from flsim.runs.config.files import sections

DOCS = Path(__file__).parents[1] / "docs"
# Pages with examples of a command.
GUIDES = {
    "demo": "first-run.md",
    "settings": "configuration.md",
    "data import": "own-data.md",
    "data synthetic": "corpora.md",
    "data inspect": "own-data.md",
    "data push": "object-stores.md",
    "data plant": "defences.md",
    "data canaries": "elsewhere.md",
    "data preflight": "elsewhere.md",
    "data deduplicate": "defences.md",
    "data sanitize": "defences.md",
    "run": "own-data.md",
    "sweep": "sweeps.md",
    "tune": "tuning.md",
    "plan": "sweeps.md",
    "verify": "first-run.md",
    "evaluate": "auditing.md",
    "quantize": "defences.md",
    "export": "hugging-face.md",
    "privacy": "dp.md",
    "audit": "what-it-proves.md",
    "forgetting": "forgetting.md",
    "membership": "membership.md",
    "extract": "extraction.md",
    "reveal": "reveal.md",
    "table": "partitions.md",
    "plot": "partitions.md",
    "canaries": "first-run.md",
    "compare": "partitions.md",
    "trace": "trace.md",
    "report": "sweeps.md",
}
HEAD = """# Command line

This page describes every command and option. `flsim COMMAND --help` prints the same text.

Results go to standard output. Progress and errors go to standard error, and an error is one line.

| exit code | meaning |
|---:|---|
| 0 | success |
| 1 | a run or a disk failed, or `flsim verify` found a difference |
| 2 | wrong input; the line names the value and the remedy |
| 130, 143 | ended by Ctrl-C or SIGTERM; runs have saved a checkpoint |

## Commands

| command | what it does | guide |
|---|---|---|
"""
COMPLETION = """
## Completion

The Tab key completes commands, options and file names in bash and zsh. Set this up once:

    flsim --install-completion

This adds a line to the start file of your shell, `~/.bashrc` or `~/.zshrc`. Then open a new shell.

To change no file, run one of these lines in a shell. The effect lasts until you leave the shell:

    eval "$(_FLSIM_COMPLETE=source_bash flsim)"     # bash
    eval "$(_FLSIM_COMPLETE=source_zsh flsim)"      # zsh, after: autoload -Uz compinit && compinit

`flsim --show-completion` prints the script that completes.
"""
ABOUT = """\
A configuration is a TOML file with the sections below. Every setting has a default except `data.corpus`. Defaults
follow Thakkar et al. (2020). The paper does not state batch size, learning rate and number of epochs of local training,
so those defaults are flsim's.

A key that flsim does not know is an error. On the command line, `--set section.key=value` replaces a setting. To use
custom code, name it as `path/to/file.py:NAME`. `flsim settings` prints this list in a terminal."""
ROOT = typer.main.get_command(app)


def documents() -> dict[Path, str]:
    """Return the text of each page by its file."""
    return {
        DOCS / "command-line.md": "\n".join([HEAD.rstrip(), *_table(), COMPLETION, *_sections()]),
        DOCS / "configuration.md": _settings(),
    }


def commands() -> dict[str, click.Command]:
    """Return all commands by name, without groups, in the order of the panels of `flsim --help`."""
    found = dict(_commands(ROOT, ""))
    panel_of = {name: getattr(command, "rich_help_panel", None) for name, command in ROOT.commands.items()}  # type: ignore[attr-defined]
    return dict(sorted(found.items(), key=lambda item: list(PANELS).index(panel_of[item[0].split()[0]])))


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name, child in command.commands.items():
        yield from _commands(child, f"{path} {name}".strip())


def _table() -> Iterator[str]:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    titles = {page: title for title, page in re.findall(r"^(.+) <(.+\.md)>$", index, re.MULTILINE)}
    for name, command in commands().items():
        summary, page = marked(str(command.help).split("\n\n")[0]), GUIDES[name]
        yield f"| [`flsim {name}`](#flsim-{name.replace(' ', '-')}) | {summary} | [{titles[page]}]({page}) |"


def _sections() -> Iterator[str]:
    for name, command in commands().items():
        context = click.Context(command, info_name=f"flsim {name}")
        yield f"## flsim {name}\n"
        yield f"```text\nflsim {name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        for paragraph in str(command.help).split("\n\n"):
            yield f"{marked(paragraph)}\n"
        for panel, parameters in _panels(command).items():
            yield f"**{panel}**\n"
            for parameter in parameters:
                yield _entry(parameter, context)
        if command.epilog:
            examples = [line.removeprefix("Example: ") for line in command.epilog.split("\n\n")]
            yield "**Examples**\n\n```text\n" + "\n".join(" ".join(line.split()) for line in examples) + "\n```\n"


def _panels(command: click.Command) -> dict[str, list[click.Parameter]]:
    """Return the parameters by the panel that the help shows them in; without `--help`."""
    panels: dict[str, list[click.Parameter]] = {}
    for parameter in command.params:
        kind = "Arguments" if isinstance(parameter, click.Argument) else "Options"
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(parameter)
    return panels


def _entry(parameter: click.Parameter, context: click.Context) -> str:
    """Return an entry of a definition list: the names, the sentence, and what is required or the default."""
    names, text = parameter.get_help_record(context) or ("", "")
    text, _, extra = text.replace("\\[", "[").partition("  [")
    facts = extra.removesuffix("]").replace("[", "\\[").replace("|", "\\|").replace("*", "\\*")
    facts = facts[:1].upper() + facts[1:]
    return f"`{names}`\n: {marked(text)}" + (f" *{facts}.*" if facts else "") + "\n"


def _settings() -> str:
    """Return the list of settings, with a heading for each section and a definition list."""
    lines = ["# Configuration", "", ABOUT, ""]
    for section in sections():
        lines += [f"## {section.title}", ""]
        lines += [marked(section.description), ""] if section.description else []
        for setting in section.settings:
            default = f"default `{setting.default}`" if setting.default not in ("", "required") else setting.default
            unit = f"unit: {setting.unit}" if setting.unit else ""
            facts = filter(None, (setting.type, default, unit))
            lines += [f"`{setting.name}`", f": *{'; '.join(facts)}.* {marked(setting.description)}", ""]
    return "\n".join(lines)


def marked(text: str) -> str:
    """Return a sentence of the help as Markdown: options, settings, paths and values as code, without other markup."""
    return " ".join(_marked_word(word) for word in text.split())


def _marked_word(word: str) -> str:
    start, core, end = re.fullmatch(r"([(\"]*)(.*?)([)\",;:.]*)", word).groups()  # type: ignore[union-attr]
    is_code = (
        re.match(r"--?[a-z]|[\w.-]+/[\w{]|\w+://|\{\w", core)
        or re.search(r"\w=\w|[a-z]_[a-z]|\w\.(py|toml|csv|md|jsonl|html|png|txt|h5)\b", core)
        or re.fullmatch(r"[a-z]+(\.[a-z_]+)+|[A-Z]+_[A-Z_]+", core)
    )
    if not is_code or re.search(r"[\^|()]", core) or core in ("e.g", "i.e", "and/or"):
        return re.sub(r"([*_<\[\]|])", r"\\\1", word)
    return f"{start}`{core}`{end}"


if __name__ == "__main__":
    for page, text in documents().items():
        page.write_text(text, encoding="utf-8")
        print(page)
