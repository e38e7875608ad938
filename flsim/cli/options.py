"""Options that several commands share."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a setting, as section.key=value; repeatable. Paths are relative to this folder."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
