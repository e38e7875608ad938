"""Settings of an import."""

from dataclasses import asdict, dataclass
from typing import Any

from flsim.base.errors import InputError, at_least_one
from flsim.data.manifest import SPLITS, WHOLE
from flsim.data.vocabulary import By, Layout, refuse_unit

# Settings that manifests of earlier commits do not have, with their defaults.
ADDED: dict[str, Any] = {"by": "words", "ascii": False, "drop_authors": ()}


@dataclass(frozen=True)
class ImportHParams:
    """Settings of an import; the defaults are those of Thakkar et al. (2020).

    Attributes:
        vocabulary_size: number of token ids, the four special ones included.
        record_words: a record is a sentence cut at this many words.
        words_per_user: authors who wrote fewer words are dropped. The others are cut into users who wrote at least this
            many. Punctuation is not counted, and sentences are counted before they are cut. None keeps authors whole;
            otherwise test and held-out authors are also kept whole, in splits of their own.
        heldout: expected share of authors kept out of training, for attacks that need texts of non-members. Authors
            whose split the source states are not counted.
        test: expected share of authors kept out of training to measure utility, with the same exception.
        seed: decides which authors are kept out.
        layout: layout of token ids; a key of `flsim.data.vocabulary.LAYOUTS`.
        by: "characters" takes each character of a sentence for a word, spaces and punctuation too. The other settings
            then count characters; set a larger `record_words`, e.g. 600.
        ascii: whether characters outside ASCII are removed from plain text, as in TensorFlow Federated's Stack Overflow
            data. Formats that publish sentences as tokens are read as they are.
        drop_authors: names of authors whose posts are dropped, such as ``[deleted]``.

    Examples:
        >>> flsim.ImportSettings(vocabulary_size=5_000, words_per_user=500)    # doctest: +SKIP
    """

    vocabulary_size: int = 10_000
    record_words: int = 20
    words_per_user: int | None = 2_000
    heldout: float = 0.1
    test: float = 0.1
    seed: int = 0
    layout: str = "tff"
    by: By = "words"
    ascii: bool = False
    drop_authors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        refuse_unit(self.by)
        Layout(self.vocabulary_size, self.record_words, self.layout)
        at_least_one(words_per_user=1 if self.words_per_user is None else self.words_per_user)
        for name in ("heldout", "test"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be a share of authors from 0 up to 1, found {getattr(self, name)}")
        if self.heldout + self.test >= 1:
            raise InputError(
                f"heldout + test must be less than 1, or no author is left to train, found {self.heldout + self.test}"
            )

    @property
    def described(self) -> dict[str, Any]:
        """Return the settings by name, without `ADDED` ones at their default, so that corpora keep their digests."""
        return {name: value for name, value in asdict(self).items() if name not in ADDED or value != ADDED[name]}

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the corpus' splits: those of `WHOLE` are among them where authors are cut or dropped."""
        return SPLITS if self.words_per_user is None else (*SPLITS, *WHOLE.values())
