"""Text as the tokens of a Hugging Face tokenizer, and the token ids of a corpus for them.

A corpus whose text is cut with a tokenizer has these files, in addition to the files of every corpus:

    tokens.i64     for each token id of the corpus, the id of the model, which is a row of its embedding
    tokenizer/     the tokenizer: tokenizer.json, and other files of the tokenizer's folder

The ids of the corpus are a permutation of the model's ids, in which the ids of words are consecutive. All rows of the
model have an id, including rows that no token uses. A word is a token that is a space and letters, and that the
tokenizer finds again in its text.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flsim.base.arrays import Flags, Ints
from flsim.base.errors import InputError, in_one_line
from flsim.base.files import file_digest
from flsim.data.manifest import TOKENIZER_FILES
from flsim.data.records import SPECIAL_TOKENS, TOKENIZER, Layout, Vocabulary

if TYPE_CHECKING:
    import tokenizers

TABLE = "tokens.i64"
FOLDER = "tokenizer"
FILE = "tokenizer.json"
TRAINED = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
SMALLEST = 256 + len(TRAINED) + 1  # tokens of a trained tokenizer: all bytes, and one that is made of them


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer of a folder, as `save_pretrained` of transformers writes it."""

    folder: Path

    @cached_property
    def backend(self) -> "tokenizers.Tokenizer":
        tokenizer: tokenizers.Tokenizer = _imported().Tokenizer.from_str(_read(self.folder, FILE))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # the name of a special token in a text is plain text
        return tokenizer

    def refuse_unusable(self) -> None:
        """Raise InputError if the folder has no tokenizer, or its tokenizer cannot make a corpus."""
        if not (self.folder / FILE).is_file():
            raise InputError(
                f"{self.folder}: has no {FILE}; name a folder that save_pretrained of a tokenizer wrote, with "
                "transformers 5 or a fast tokenizer of an earlier release"
            )
        try:
            self.backend.get_vocab_size()
        except InputError:
            raise
        except Exception as error:  # the library raises no other class
            raise InputError(f"{self.folder / FILE}: not a tokenizer ({in_one_line(error):.200})") from error

    @cached_property
    def rows(self) -> int:
        tokens = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        config = _described(self.folder, "config.json")
        rows = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", tokens))
        if rows < tokens:
            raise InputError(
                f"{self.folder}: {FILE} has {tokens:,} tokens, but the model of config.json has a vocab_size of "
                f"{rows:,}; add rows to the model, or name the tokenizer that belongs to it"
            )
        return int(rows)

    @cached_property
    def special(self) -> dict[str, int]:
        """Rows of "pad", "oov", "bos" and "eos"; a missing token has the row of another special token."""
        ids = dict[str, int]()
        for file in ("config.json", "special_tokens_map.json", "tokenizer_config.json"):  # the last wins
            values = _described(self.folder, file)
            for name in ("pad", "unk", "bos", "eos", "cls", "sep"):
                token = values.get(f"{name}_token")
                token = token.get("content") if isinstance(token, Mapping) else token
                id_ = self.backend.token_to_id(token) if isinstance(token, str) else values.get(f"{name}_token_id")
                id_ = id_[0] if isinstance(id_, list) and id_ else id_
                if isinstance(id_, int) and 0 <= id_ < self.rows:
                    ids[name] = id_
        begins = [ids[name] for name in ("bos", "cls") if name in ids]
        ends = [ids[name] for name in ("eos", "sep") if name in ids]
        if not begins and not ends:
            raise InputError(
                f"{self.folder}: has no token for the begin or the end of a text; add tokenizer_config.json with "
                '{"eos_token": ...}'
            )
        bos, eos = (begins or ends)[0], (ends or begins)[0]
        return {"pad": ids.get("pad", eos), "oov": ids.get("unk", eos), "bos": bos, "eos": eos}

    @cached_property
    def is_word(self) -> Flags:
        """Return which tokens are words, bool [rows]: " the" is a word, "the" and " 3" are not.

        A word that is repeated once must give its text twice, and the tokenizer must cut this text into the same two
        tokens. Then a text of any words is cut into these words, if the tokenizer first cuts text at spaces.
        """
        is_word = np.zeros(self.rows, np.bool_)
        for id_ in self.backend.get_vocab(with_added_tokens=False).values():
            first, _, second = (text := self.decode([id_, id_])).removeprefix(" ").partition(" ")
            is_word[id_] = first.isalpha() and first == second and self.encode(text) == [id_, id_]
        is_word[list(self.special.values())] = False
        return is_word

    def encode(self, text: str) -> list[int]:
        """Return the model's ids of a text, without special tokens around them."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([*map(int, ids)], skip_special_tokens=False))

    def token(self, id_: int) -> str:
        """Return the tokenizer's spelling of a token, such as ``Ġthe``, escaped as in JSON, or its row's number."""
        return json.dumps(self.backend.id_to_token(id_) or f"<row {id_}>", ensure_ascii=False)[1:-1]

    def has_tokens_of(self, other: "Tokenizer") -> bool:
        """Return whether two tokenizers have the same tokens, with the same ids."""
        is_same_file = file_digest(self.folder / FILE) == file_digest(other.folder / FILE)
        return is_same_file or bool(self.backend.get_vocab() == other.backend.get_vocab())

    def table(self, counts: Ints) -> tuple[Layout, Ints]:
        """Return the layout of a corpus and the model's ids [V], of words and of pieces by descending counts [rows]."""
        special = self.special
        if not self.is_word.any():
            raise InputError(
                f"{FILE}: no token is a space and letters, and canaries need such words; use a tokenizer with "
                "more tokens"
            )
        order = np.lexsort((np.arange(self.rows), -counts))
        order = order[~np.isin(order, list(special.values()))]
        words, pieces = order[self.is_word[order]], order[~self.is_word[order]]
        ends = [special[name] for name in ("oov", "bos", "eos")]
        layout = Layout(len(order) + SPECIAL_TOKENS, 1, TOKENIZER, len(pieces))
        return layout, np.array([special["pad"], *words, *pieces, *ends], np.int64)

    def write(self, folder: Path) -> None:
        folder.mkdir()
        for name in (FILE, *TOKENIZER_FILES):
            if (self.folder / name).is_file():
                (folder / name).write_bytes((self.folder / name).read_bytes())

    @property
    def files(self) -> dict[str, str]:
        names = (FILE, *TOKENIZER_FILES, "config.json")
        return {name: file_digest(self.folder / name) for name in names if (self.folder / name).is_file()}


def train_tokenizer(texts: Iterator[str], size: int, folder: Path) -> None:
    """Write a byte-level BPE tokenizer: four special tokens, 256 bytes, and merges within words, as in GPT-2."""
    library = _imported()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forks of this process would warn about its threads
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*TRAINED.values()], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (tokens := tokenizer.get_vocab_size()) < size:
        raise InputError(
            f"the text is enough for {tokens:,} tokens, fewer than {size:,}; set --train-tokenizer {tokens}"
        )
    tokenizer.save(str(folder / FILE))
    description = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **TRAINED}
    (folder / "tokenizer_config.json").write_text(json.dumps(description, indent=2))


def _imported() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401 (submodules)
    except ImportError as error:
        raise InputError(
            "tokenizers: not installed, and a tokenizer is needed; install the extra hf: pip install '.[hf]'"
        ) from error
    return tokenizers


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / name}: cannot be read ({in_one_line(error)})") from error


def _described(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; an empty one if there is no such file."""
    if not (folder / name).is_file():
        return {}
    try:
        value = json.loads(_read(folder, name))
    except ValueError as error:
        raise InputError(f"{folder / name}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{folder / name}: not a JSON object")
    return value


@dataclass(frozen=True, eq=False)
class TokenMap:
    """The correspondence of the token ids of a corpus and the ids of a model, which are rows of its embedding.

    Every row of the model occurs at least once in `ids` [V]. Several special ids can have the same row, if a tokenizer
    has no padding, or one token for begin and end. `transformers.AutoTokenizer.from_pretrained` reads the folder.
    """

    layout: Layout
    ids: Ints
    folder: Path

    @classmethod
    def open(cls, corpus: Path, layout: Layout) -> "TokenMap | None":
        """Return the map of a corpus' folder, or None if it was made without a tokenizer; InputError if it is unfit."""
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

    def write(self, corpus: Path) -> None:
        """Write the table and the tokenizer into the folder of a corpus that is being made."""
        self.ids.astype("<i8").tofile(corpus / TABLE)
        self.tokenizer.write(corpus / FOLDER)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.folder)

    @property
    def rows(self) -> int:
        return int(self.ids.max()) + 1

    @cached_property
    def from_model(self) -> Ints:
        """The corpus' id of each of the model's ids [rows]; an unknown token is OOV, even in the row of EOS."""
        ids = np.full(self.rows, self.layout.oov)
        for id_ in (self.layout.pad, self.layout.bos, self.layout.eos, self.layout.oov):
            ids[self.ids[id_]] = id_
        text = np.array(self.layout.text_ids)
        ids[self.ids[text]] = text
        return ids


@dataclass(frozen=True)
class TokenVocabulary(Vocabulary):
    """The vocabulary of a corpus that a tokenizer has cut: words and pieces in the tokenizer's spelling."""

    map: TokenMap = field(kw_only=True, compare=False)

    def write(self, path: Path) -> None:
        """Write the words as other vocabularies do, and next to their file the ids and the tokenizer."""
        super().write(path)
        self.map.write(path.parent)

    def text(self, tokens: Iterable[int]) -> str:
        return self.map.tokenizer.decode(self.map.ids[list(tokens)])

    @property
    def word_ids(self) -> range:
        return range(self.map.layout.first_word, self.map.layout.last_word + 1)

    def symbol(self, character: str) -> int | None:
        """Return the token id of one character; None if the tokenizer has no token for it."""
        id_ = self.map.tokenizer.backend.token_to_id(character)
        return None if id_ is None else int(self.map.from_model[id_])

    def encode_text(self, text: str) -> list[int]:
        return list(self.map.from_model[self.map.tokenizer.encode(text)].tolist())
