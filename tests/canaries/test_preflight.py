"""Tests of preflight, which checks that canaries receive loss, against targets that are built token by token."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from helpers import Flsim

from flsim.base.errors import InputError
from flsim.canaries.elsewhere import FILES, CanarySet, OtherUsers, ReadingOfRecords, Rows, WordList, encoder, preflight
from flsim.canaries.spec import CanaryHParams


@pytest.fixture
def drawn(tmp_path: Path) -> CanarySet:
    (tmp_path / "words.txt").write_text("".join(f"w{index}\n" for index in range(300)))
    hparams = CanaryHParams(insertions=(1, 3), count=2, length=4, controls=2)
    return CanarySet.draw(WordList.read(tmp_path / "words.txt"), OtherUsers.alike(4, 5), hparams, 0, 2)


def characters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def words(text: str) -> list[int]:
    return list(range(len(text.split())))


@pytest.mark.parametrize("encode", [characters, words])
def test_tokens_with_loss(drawn: CanarySet, encode: Callable[[str], list[int]]) -> None:
    """The oracle makes the tokens of a record one by one, and marks whether each is text of the canary."""
    canary = drawn.planting.canaries[0]
    phrase, known = drawn.text_of(canary)["text"], drawn.known_text(canary)
    record = {"prompt": f"x y {known}", "text": phrase[len(known) :] + " z"}
    for length, masks, begins in product([None, *range(1, 30, 3)], [False, True], [False, True]):
        row = preflight(drawn, ReadingOfRecords(encode, length, masks, begins), [record]).to_dict("records")[0]
        marked = [False] * begins + [False] * len(encode(f"x y {known}"))
        first = len(marked)
        marked += [True] * len(encode(phrase[len(known) :])) + [False] * len(encode(" z"))
        cut = len(marked) if length is None else length
        targets = [mark for place, mark in enumerate(marked[:cut]) if place and not (masks and place < first)]
        assert (row["tokens"], row["loss"]) == (sum(marked), sum(targets)), (length, masks, begins)
        assert row["trained"] == ("none" if not sum(targets) else "all" if sum(targets) == sum(marked) else "part")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "instructions"])
def test_records_of_every_form_pass(drawn: CanarySet, tmp_path: Path, flsim: Flsim, kind: Rows) -> None:
    """All planted canaries receive loss in the completion, and the manifest has their law and the kind of rows."""
    drawn.write(tmp_path / "planted", kind)
    columns = ("--prompt-column", "prompt", "--text-column", "completion", "--mask-prompt")
    options = columns if kind == "instructions" else ()
    records = tmp_path / "planted" / FILES[kind]
    code, out, err = flsim("data", "preflight", tmp_path / "planted", records, *options, "--json")
    assert code == 0, err
    assert {(row["planned"], row["found"], row["trained"]) for row in json.loads(out)} == {(1, 1, "all"), (3, 3, "all")}
    manifest = json.loads((tmp_path / "planted" / "canaries.json").read_text())
    assert manifest["rows"] == kind
    law = {name: manifest["law"][name] for name in ("seed", "prefix", "layout", "unit")}
    assert law == {"seed": 0, "prefix": 2, "layout": "tff", "unit": "user"}
    assert manifest["law"]["canaries"]["insertions"] == [1, 3]


def test_a_training_file_is_compared_with_the_folder(drawn: CanarySet, tmp_path: Path, flsim: Flsim) -> None:
    """The written records pass; a lost copy, a control in the text, and records that are cut too short do not."""
    drawn.write(tmp_path / "planted", "instructions")
    lines = (tmp_path / "planted" / "records.jsonl").read_text().splitlines()
    file, columns = tmp_path / "train.jsonl", ("--prompt-column", "prompt", "--text-column", "completion")

    def checked(rows: list[str], *options: str) -> tuple[int, str]:
        file.write_text("\n".join(rows))
        code, out, err = flsim("data", "preflight", tmp_path / "planted", file, *columns, *options)
        assert ("Canary" in out) == (code < 2)
        return code, err

    assert checked(lines, "--mask-prompt") == (0, "")
    assert checked(lines[1:])[0] == 1
    assert "has another number of copies than" in checked(lines[1:])[1]
    control = drawn.planting.canaries[-1]
    stray = json.dumps({"prompt": drawn.text_of(control)["text"], "completion": " z"})
    assert f"e.g. of {control.id}" in checked([*lines, stray])[1]
    longer = json.dumps({"prompt": drawn.text_of(control)["text"] + "1", "completion": " z"})
    assert checked([*lines, longer])[0] == 0  # another word is not a copy
    assert "4 canaries have no loss" in checked(lines, "--record-length", "3")[1]
    assert checked(lines, "--record-length", "4") == (0, "")  # the first unknown word is a target
    (tmp_path / "mine.py").write_text(
        "def letters(text):\n    return [*text]\n\ndef fails(text):\n    raise KeyError(1)\n"
    )
    assert checked(lines, "--tokenizer", f"{tmp_path / 'mine.py'}:letters") == (0, "")
    failed, err = checked(lines, "--tokenizer", f"{tmp_path / 'mine.py'}:fails")
    assert (failed, "mine.py:5: KeyError" in err) == (2, True)
    assert checked(["{}"])[0] == 2


def test_a_list_of_records_can_be_absent_but_not_changed(drawn: CanarySet, tmp_path: Path) -> None:
    drawn.write(tmp_path / "planted")
    records = tmp_path / "planted" / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(InputError, match=r"records\.jsonl has changed"):
        CanarySet.read(tmp_path / "planted")
    records.unlink()
    assert CanarySet.read(tmp_path / "planted").identity == drawn.identity


@pytest.mark.parametrize("name", ["CONSTANT", "nothing"])
def test_a_tokenizer_without_token_ids_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text("CONSTANT = [1]\n\ndef nothing(text):\n    pass\n")
    with pytest.raises(InputError, match=f"{name}: .*; it needs a function from text to a list of token ids"):
        encoder(f"{tmp_path / 'mine.py'}:{name}")("text")


@pytest.mark.parametrize(
    ("user", "message"), [("null", "record 2 has no user"), (r'"\ud800"', "surrogates not allowed")]
)
def test_a_record_without_a_user_is_refused(tmp_path: Path, user: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"user": "a"}}\n{{"user": {user}}}\n')
    with pytest.raises(InputError, match=message):
        OtherUsers.in_file(tmp_path / "train.jsonl")


def test_a_suffix_can_have_capitals(tmp_path: Path) -> None:
    (tmp_path / "TRAIN.CSV").write_text("user\na\nb\na\n")
    assert OtherUsers.in_file(tmp_path / "TRAIN.CSV").counts.tolist() == [2, 1]
