"""Text as the tokens of a Hugging Face tokenizer, and the ids of a corpus for them.

A corpus whose text is cut by a tokenizer holds, next to the files that every corpus has:

    tokens.i64     for each token id of the corpus, the id of the model, which is a row of its embedding
    tokenizer/     the tokenizer: tokenizer.json, and what else its folder says about it

The ids of the corpus are a permutation of the model's, so that the ids of words are consecutive as in every corpus:
canaries are drawn from `Layout.first_word` to `Layout.last_word`. All rows of the model have an id, also those that no
token uses.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.files import digest, file_digest
from flsim.data.vocabulary import TOKENIZER, Layout

TABLE = "tokens.i64"
FOLDER = "tokenizer"
FILE = "tokenizer.json"
# Files that a tokenizer's folder may have beside tokenizer.json; they name its special tokens, or templates of chats.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True, eq=False)
class TokenMap:
    """The correspondence of the token ids of a corpus and the ids of a model, which are rows of its embedding.

    Attributes:
        layout: the layout of the corpus' token ids; its name is `TOKENIZER`.
        ids: int64 [V], the model's id of each id of the corpus. Every row of the model is there at least once. Several
            special ids may have the same row: where a tokenizer has no padding, or one token for begin and end.
        folder: the folder of the tokenizer, as `transformers.AutoTokenizer.from_pretrained` reads it.
    """

    layout: Layout
    ids: NDArray[np.int64]
    folder: Path

    @classmethod
    def open(cls, corpus: Path, layout: Layout) -> "TokenMap | None":
        """Return the map of a corpus' folder; None where the corpus was made without a tokenizer.

        Raises:
            InputError: the table does not fit the layout, or a file is missing.
        """
        if layout.name != TOKENIZER:
            return None
        path = corpus / TABLE
        try:
            ids = np.fromfile(path, "<i8")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); import the corpus again") from error
        rows = np.unique(ids)
        if len(ids) != layout.vocabulary_size or not np.array_equal(rows, np.arange(len(rows))):
            raise InputError(f"{path}: not an id of the model for each of {layout.vocabulary_size:,} ids of the corpus")
        if not (corpus / FOLDER / FILE).is_file():
            raise InputError(f"{corpus / FOLDER / FILE}: no such file; import the corpus again")
        return cls(layout, ids.astype(np.int64), corpus / FOLDER)

    @property
    def rows(self) -> int:
        """Return the number of rows of the model's embedding."""
        return int(self.ids.max()) + 1

    @cached_property
    def repeated(self) -> NDArray[np.bool_]:
        """Return which ids of the corpus stand for a row that another id stands for, too: bool [V].

        One id of each row is not repeated: a word, a piece or EOS before others, which are never targets. The logit of
        a repeated id should be far below all others.
        """
        layout = self.layout
        first = [*range(layout.first_word, layout.oov), layout.eos, layout.bos, layout.oov, layout.pad]
        _, places = np.unique(self.ids[first], return_index=True)
        repeated = np.ones(len(self.ids), np.bool_)
        repeated[np.array(first)[places]] = False
        return repeated

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the table and of tokenizer.json."""
        return digest(self.ids.astype("<i8").tobytes(), file_digest(self.folder / FILE))
