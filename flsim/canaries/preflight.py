"""A check that a training reads canaries: in a training file, with a tokenizer, a record length and a prompt mask.

A token has loss if it is within the record length, is not in a masked prompt, and is not the first token of a record
without a begin token. A canary without loss for any unknown word proves nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from flsim.base.errors import InputError
from flsim.base.extensions import custom_call_errors, is_custom, resolve
from flsim.canaries.elsewhere import CanarySet, read_rows
from flsim.data.tokenizer import Tokenizer

Encode = Callable[[str], Sequence[int]]
ALL, PART, NONE = "all", "part", "none"


@dataclass(frozen=True)
class Training:
    """The settings of a training that decide how records are read: `encode` returns ids without special tokens.

    A record is cut after `length` tokens, with that with which each record begins, if `begins`.
    """

    encode: Encode
    length: int | None = None
    masks_prompt: bool = False
    begins: bool = True

    def targets(self, prompt: str, text: str, first: int, last: int) -> tuple[int, int]:
        """Return the number of tokens of characters `first` to `last` of prompt and text, and of those with loss."""
        start, end = len(self.encode(text[: max(0, first)])), len(self.encode(text[:last]))
        lowest = len(self.encode(prompt)) if self.masks_prompt else 0
        lowest = max(lowest, 0 if self.begins else 1)
        highest = end if self.length is None else self.length - self.begins
        return end - start, max(0, min(end, highest) - max(start, lowest))


def encoder(name: str | None) -> Encode:
    """Return a function text -> token ids: of a Hugging Face folder, of a custom file, or words if the name is None."""
    if name is None:
        return lambda text: range(len(text.split()))
    if is_custom(name):
        function: Encode = resolve(name, {}, "tokenizer")

        def encode(text: str) -> Sequence[int]:
            with custom_call_errors(name, "a function from text to a list of token ids", InputError):
                return list(function(text))

        return encode
    tokenizer = Tokenizer(Path(name))
    tokenizer.refuse_unusable()
    return tokenizer.encode


def preflight(drawn: CanarySet, training: Training, records: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """Return a row for each canary that has planned copies or copies in the records.

    Records have ``prompt`` and ``text``, without the prompt. Columns: ``canary``; ``planned`` and ``found``, numbers of
    copies; and of the copy with the smallest share of loss, ``tokens`` of unknown words, those with ``loss``, and
    ``trained``, whether "all", "part" or "none" of them have loss. Raises InputError if a custom tokenizer failed.
    """
    texts = [(row["prompt"], row["prompt"] + row["text"]) for row in records]
    rows = []
    for canary, planned in zip(drawn.planting.canaries, drawn.planting.insertions.tolist(), strict=True):
        known, phrase = drawn.known_text(canary), drawn.text_of(canary)["text"]
        targets = [
            training.targets(prompt, text, at + len(known), at + len(phrase))
            for prompt, text in texts
            for at in _places(phrase, text)
        ]
        if planned or targets:
            tokens, loss = min(targets, key=lambda counts: counts[1] / max(1, counts[0]), default=(0, 0))
            trained = NONE if not loss else ALL if loss == tokens else PART
            counts = {"canary": canary.id, "planned": planned, "found": len(targets)}
            rows.append(counts | {"tokens": tokens, "loss": loss, "trained": trained})
    return pd.DataFrame(rows, columns=["canary", "planned", "found", "tokens", "loss", "trained"])


def _places(phrase: str, text: str) -> Iterator[int]:
    """Yield the positions of a phrase among the complete words of a text; at its begin, the leading space is absent."""
    bare = phrase.lstrip()
    for match in re.finditer(rf"(?<!\w){re.escape(bare)}(?!\w)", text):
        yield match.start() - (len(phrase) - len(bare))


def read_records(path: Path, text: str = "text", prompt: str | None = None) -> list[dict[str, str]]:
    """Return the rows of a training file as ``prompt`` (empty for none) and ``text``; see `read_rows`."""
    rows = read_rows(path, [text] if prompt is None else [prompt, text])
    return [{"prompt": "".join(prompts), "text": text} for *prompts, text in rows]
