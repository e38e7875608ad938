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
        value: the value; a text if it is not a number.
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


# For an NVIDIA H200: measurements on one, minus the expected savings of later changes. docs/gpu.md has predictions from
# before any measurement. docs/benchmarks.md has the basis of the present ones.
PREDICTED: dict[str, dict[str, str]] = {
    "env": {
        "copy in memory": "4,190 GB/s",
        "product in bf16": "600 to 800 TFLOP/s",
        "product in tf32": "430 TFLOP/s",
        "product in float32": "51 TFLOP/s",
    },
    "engine": {
        "bf16, 264 at once": "2,450 ± 250 users/s; 1,985 before tuning",
        "bf16, 264 at once: training only": "3,000 ± 300 users/s; 2,334 before tuning",
        "bf16, 264 at once: packing only": "7,600 to 11,800 users/s with one thread",
        "bf16, 264 at once: peak memory": "2.9 GB",
        "bf16, 264 at once, weights on the chip": "2,900 to 3,400 users/s",
        "bf16, 264 at once, weights on the chip: training only": "3,400 to 4,000 users/s",
        "bf16, 528 at once": "2,000 ± 200 users/s; 1,626 before tuning",
        "bf16, 132 at once": "2,100 ± 300 users/s: between those of 88 and of 264 at once",
        "tf32, 264 at once": "1,000 ± 100 users/s; 973 before",
        "float32, 264 at once": "500 ± 100 users/s; 537 with a recurrence in Triton",
        "float32, 264 at once: peak memory": "5.5 GB",
    },
    "profile": {
        "a step of 264 users": "4.4 to 4.6 ms; 5.9 before tuning",
    },
    # Arithmetic: 3 us for each of 20 times, and 44 users at once, so that 264 users need 0.4 ms; more if programs wait.
    "recurrence": {
        "on the chip, 128 units, 4 warps, forth": "0.4 to 0.7 ms",
        "on the chip, 128 units, 4 warps, back": "0.5 to 0.8 ms",
    },
    "central": {
        "ours, bf16": "0.42 ms a step",
        "ours, tf32": "0.53 ms a step",
        "ours": "0.71 ms a step",
        "plain": "11.8 ms a step",
    },
    "lora": {  # arithmetic, for one H100: products at 350 to 400 TFLOP/s, and about 10 us of each call of a kernel
        "GPT-2 small, one at a time": "5 to 7 users/s",
        "GPT-2 small, blocks of 64": "150 to 200 users/s",
        "GPT-2 small, blocks of 64: peak memory": "15 GB",
        "GPT-2 small, blocks of 64: ratio": "20 to 35 times one at a time",
        "0.9 billion parameters, one at a time": "5 users/s",
        "0.9 billion parameters, blocks of 32": "35 to 40 users/s",
        "0.9 billion parameters, blocks of 32: ratio": "6 to 8 times one at a time",
    },
    "ranks": {
        "ranks of 90 canaries, |R| 2,000,000": "14 s",
        "decisions of 90 canaries, |R| 2,000,000": "2 s",
    },
}
ALWAYS = {"repeat": "the same bits", "tests": "all pass"}  # the prediction of every figure of these parts


def predicted(part: str, name: str) -> str:
    """Return the prediction of a figure; empty if there is none."""
    return PREDICTED.get(part, {}).get(name, ALWAYS.get(part, ""))


def page(measured: Mapping[str, Any]) -> str:
    """Return a page of Markdown: measurements and predictions for an H200, part by part.

    Args:
        measured: the content of gpu.json: by the name of each part its ``status``, ``seconds``, ``figures`` and
            ``details``.
    """
    lines = ["# Measurements on a GPU, with predictions", ""]
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
