"""The figures that parts of `make gpu` measure, with their predictions, and the page that shows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_LINES = 40  # of a detail, such as a table of the profiler


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        name: what was measured, unique within its part.
        value: the value; a text where it is no number.
        unit: the unit of a number.
    """

    name: str
    value: float | str
    unit: str = ""


@dataclass(frozen=True)
class Detail:
    """A longer text that belongs to a part, such as a table of the profiler."""

    name: str
    text: str


# For an NVIDIA H200, written down before anything was measured; docs/gpu.md derives them.
PREDICTED: dict[str, dict[str, str]] = {
    "env": {
        "copy in memory": "about 4,000 GB/s",
        "product in bf16": "600 to 800 TFLOP/s",
        "product in tf32": "300 to 450 TFLOP/s",
        "product in float32": "45 to 60 TFLOP/s",
    },
    "engine": {
        "bf16 by position, 264 at once": "4,200 ± 700 users/s",
        "bf16 by position, 264 at once: training only": "4,600 ± 700 users/s",
        "bf16 by position, 264 at once: packing only": "10,000 users/s with one thread",
        "bf16 by position, 264 at once: peak memory": "3.1 GB: 264 x 11.4 MB and at most 0.1 GB of libraries",
        "bf16 by position, 528 at once": "4,200 ± 700 users/s",
        "bf16 padded, 264 at once": "2,300 ± 400 users/s",
        "bf16 padded, 264 at once: training only": "2,450 ± 400 users/s",
        "bf16 padded, 264 at once: peak memory": "4.8 GB: 264 x 17.9 MB and the same",
        "tf32 padded, 264 at once": "1,300 ± 300 users/s",
        "tf32 padded, 264 at once: peak memory": "6.3 GB: 264 x 23.6 MB and the same",
        "float32 padded, 264 at once": "650 ± 250 users/s",
        "float32 padded, 264 at once: peak memory": "6.3 GB: 264 x 23.6 MB and the same",
    },
    "profile": {
        "by position: a step of 264 users": "3.3 to 3.6 ms",
        "padded: a step of 264 users": "6.5 ms",
        "padded: recurrence, forth and back": "2.2 ms",
        "padded: output layer": "0.7 ms, of the cross-entropy alone",
        "padded: gradients by weights, and update": "1.9 ms: 1.3 of it the embedding's",
        "padded: products of cuBLAS": "1.45 ms: logits 0.5, gradient by outputs 0.55, the others 0.4",
        "padded: gathers and the rest": "0.25 ms",
    },
    "central": {
        "ours, bf16": "0.22 ms a step, give or take 40%",
        "ours, tf32": "0.25 ms a step, give or take 40%",
        "ours": "0.40 ms a step, give or take 40%",
    },
    "ranks": {
        "ranks of 90 canaries, |R| 2,000,000": "8 to 12 s; 15 to 20 s for a model that memorized none",
        "decisions of 90 canaries, |R| 2,000,000": "at most 5 s",
    },
}
ALWAYS = {"repeat": "the same bits", "tests": "all pass"}  # the prediction of every figure of these parts


def predicted(part: str, name: str) -> str:
    """Return the prediction of a figure; empty where there is none."""
    return PREDICTED.get(part, {}).get(name, ALWAYS.get(part, ""))


def page(measured: Mapping[str, Any]) -> str:
    """Return a page of Markdown: what was measured beside what was predicted for an H200, part by part.

    Args:
        measured: the content of gpu.json: by the name of each part its ``status``, ``seconds``, ``figures`` and
            ``details``.
    """
    lines = ["# Measured on a GPU, beside what was predicted", ""]
    lines += ["Predictions are for one NVIDIA H200 at the full sizes.", ""]
    for name, part in measured.items():
        lines += [f"## {name}: {part['status']}, {part['seconds']:.0f} s", ""]
        if part["figures"]:
            lines += ["| | measured | predicted |", "|---|---:|---|"]
            lines += [_row(figure) for figure in part["figures"]] + [""]
        for detail in part["details"]:
            shortened = detail["text"].splitlines()[:MOST_LINES]
            lines += [f"{detail['name']}:", "", "```text", *shortened, "```", ""]
    return "\n".join(lines)


def _row(figure: Mapping[str, Any]) -> str:
    value = figure["value"]
    number = value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    cells = (figure["name"], f"{number} {figure['unit']}".strip(), figure["predicted"])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
