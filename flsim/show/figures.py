"""Style and writing of figures; equal results give equal bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from flsim.base.errors import InputError
from flsim.base.files import named_file

# Okabe and Ito (2008), distinguishable with any colour vision; yellow left out, which is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")
ROUNDS = "completed rounds (central: steps)"
FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "pdf.fonttype": 42,  # text that can be searched
    "svg.hashsalt": "flsim",  # the same results give the same bytes
}


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of a line by its number, so that lines also differ in grey."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def refuse_other_than_figure(path: Path) -> None:
    """Raise InputError unless the path is a .png, .svg or .pdf file in an existing folder."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: plots are written as .png, .svg or .pdf; name one of these")
    if not path.parent.is_dir():
        raise InputError(f"{path}: no such folder as {path.parent}; make it first")


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a figure in the common style and write it, whole or not at all.

    Raises:
        InputError: as for `refuse_other_than_figure`, or the file cannot be written.
    """
    refuse_other_than_figure(path)
    kind = FORMATS[path.suffix.lower()]
    with mpl.rc_context(STYLE), named_file(path) as partial:
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # a date would change the bytes
        draw().savefig(partial, format=kind, dpi=150, metadata=metadata)


def plain(text: str) -> str:
    """Return a text that matplotlib prints literally, because a pair of dollar signs would be mathematics."""
    return text.replace("$", r"\$")
