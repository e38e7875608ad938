"""Token ids of a corpus whose text a tokenizer cuts, and those of its model."""

from pathlib import Path

import numpy as np
import pytest

from flsim.base.errors import InputError
from flsim.data.tokenizer import FILE, FOLDER, TABLE, TokenMap
from flsim.data.vocabulary import TOKENIZER, Layout

# PAD 0; words 1, 2, 3; pieces 4, 5; OOV 6; BOS 7; EOS 8.
LAYOUT = Layout(9, name=TOKENIZER, pieces=2)


def opened(folder: Path, ids: list[int], layout: Layout = LAYOUT) -> TokenMap | None:
    np.array(ids, "<i8").tofile(folder / TABLE)
    (folder / FOLDER).mkdir()
    (folder / FOLDER / FILE).write_text("{}")
    return TokenMap.open(folder, layout)


def test_words_come_before_pieces() -> None:
    assert (LAYOUT.words, LAYOUT.first_word, LAYOUT.last_word) == (3, 1, 3)
    assert (LAYOUT.pad, LAYOUT.oov, LAYOUT.bos, LAYOUT.eos) == (0, 6, 7, 8)


@pytest.mark.parametrize(
    "arguments", [{"name": "tff", "pieces": 1}, {"name": TOKENIZER, "pieces": 5}, {"name": TOKENIZER, "pieces": -1}]
)
def test_impossible_pieces_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InputError, match="cannot have"):
        Layout(9, **arguments)  # type: ignore[arg-type]


def test_one_token_for_all_that_is_special(tmp_path: Path) -> None:
    """A tokenizer such as GPT-2's has one special token, here 5, so 6 rows; as an unknown word it is OOV."""
    tokens = opened(tmp_path, [5, 2, 0, 4, 1, 3, 5, 5, 5])
    assert tokens is not None
    assert tokens.rows == 6
    assert tokens.from_model.tolist() == [2, 4, 1, 5, 3, LAYOUT.oov]


def test_a_token_for_each_that_is_special(tmp_path: Path) -> None:
    tokens = opened(tmp_path, [0, 4, 5, 6, 7, 8, 1, 2, 3])
    assert tokens is not None
    assert tokens.rows == 9
    assert tokens.from_model[tokens.ids].tolist() == list(range(9))


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 9], [-1, 0, 1, 2, 3, 4, 5, 6, 7]])
def test_a_damaged_table_is_refused(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(InputError, match=r"tokens\.i64: not an id"):
        opened(tmp_path, ids)


def test_other_corpora_have_no_map(tmp_path: Path) -> None:
    assert TokenMap.open(tmp_path, Layout(9)) is None


def test_a_corpus_without_its_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokens\.i64: cannot be read"):
        TokenMap.open(tmp_path, LAYOUT)
