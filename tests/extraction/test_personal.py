"""Tests of personal data cover what is found in text, what prompts elicit from a known model, and counts by hand."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from dumps import write_jsonl
from helpers import TINY, Experiment, Flsim, refusal, train_here

import flsim as api
from flsim.attacks.extraction.personal import (
    Finder,
    Occurrence,
    coverage_of,
    elicited,
    occurrences_in,
    personal_data_of,
    to_text,
)
from flsim.attacks.membership.inference import AttackHParams
from flsim.base.errors import InputError
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus
from flsim.data.records import Layout, Records, Vocabulary
from flsim.models.language_model import TrainableModel

NAMES = "Ann Lee\nBo\n\n Ann  Lee-Smith \n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail Ann.Lee+x@Mail.example.org. Then call", [("mail address", "ann.lee+x@mail.example.org")]),
        ("write to bo @ site . org now", [("mail address", "bo@site.org")]),
        ("tel +49 (30) 1234-567.", [("telephone number", "49301234567")]),
        ("call 555 - 123 - 4567 now", [("telephone number", "5551234567")]),
        ("card 4111 1111 1111 1111", [("card number", "4111111111111111")]),
        ("card 4111-1111-1111-1112", []),  # 16 digits with a wrong check digit, too long for a telephone number
        ("in 2019 , 3.14 of 123456 and a1234567", []),
        ("12345678901234567890123", []),
        ("ann lee met Bo and ANN LEE-SMITH", [("name", "ann lee"), ("name", "bo"), ("name", "ann lee-smith")]),
        ("boat, Bob, annlee", []),
    ],
)
def test_personal_data_is_found_in_text(text: str, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text(NAMES)
    every = [*Finder.open(tmp_path / "names.txt").find(text)]
    assert [(kind, value) for kind, value, _, _ in every] == expected
    for _, value, start, end in every:
        assert "".join(filter(str.isalnum, text[start:end].lower())) == "".join(filter(str.isalnum, value))
    without = [kind for kind, _, _, _ in Finder.open(None).find(text)]
    assert without == [kind for kind, _ in expected if kind != "name"]


WORDS = ("write", "to", "ann", "bo", "cy", "@", "site", ".", "org", "now")
VOCABULARY = Vocabulary(WORDS, (1,) * len(WORDS))
LAYOUT = Layout(len(WORDS) + 4, 8)
IDS = {word: id_ for id_, word in enumerate(WORDS, LAYOUT.first_word)}


def ids(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


class Answers(TrainableModel):
    """A model that always predicts the same next word after each word."""

    label = "answers"

    def __init__(self, following: dict[str, str]) -> None:
        super().__init__(LAYOUT.vocabulary_size, None)  # type: ignore[arg-type]
        table = torch.zeros(LAYOUT.vocabulary_size, LAYOUT.vocabulary_size)
        table[:, LAYOUT.eos] = 1
        for word, after in following.items():
            table[IDS[word], IDS[after]] = 2
        self.table = torch.nn.Parameter(table)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


def test_personal_data_and_prompts_end_at_tokens() -> None:
    records = Records.from_lists([ids("now write to ann @ site . org now"), ids("bo @ site . org"), ids("to bo")])
    found = [*occurrences_in(records, ["a", "b", "c"], VOCABULARY, Finder())]
    assert found == [
        Occurrence("a", ("mail address", "ann@site.org"), tuple(ids("now write to")), 5),
        Occurrence("b", ("mail address", "bo@site.org"), (), 5),
    ]


def test_prompts_elicit_data_that_the_model_writes_after_them() -> None:
    """A record has at most 8 words. After four words, the model generates only four, which truncate the address."""
    model = Answers({"to": "ann", "ann": "@", "@": "site", "site": ".", ".": "org"})
    address = ("mail address", "ann@site.org")
    short, long = (
        Occurrence("a", address, tuple(ids("write to")), 5),
        Occurrence("b", address, tuple(ids("to to to to")), 5),
    )
    other = Occurrence("c", ("mail address", "cy@site.org"), tuple(ids("now")), 5)
    assert elicited(model, [short, long, other], LAYOUT, VOCABULARY, Finder()) == {("a", address)}
    quoted = Occurrence("d", address, tuple(ids("ann @ site . org")), 5)  # only the prompt has the address
    assert elicited(model, [quoted], LAYOUT, VOCABULARY, Finder()) == set()


def test_coverage_within_and_across_users_by_hand() -> None:
    """User a has data 1 and 2, b has 2 and 3, and c has 4 without a prompt. Held-out x has 5 and 1, and y has 6."""
    to, sides = tuple(ids("to")), ("a1 a2 b2 b3 c4", "x5 x1 y6")
    train, others = ([Occurrence(one[0], ("mail address", one[1]), to, 5) for one in side.split()] for side in sides)
    pairs = {("a", "1"), ("a", "3"), ("b", "2"), ("b", "4"), ("a", "2"), ("b", "5"), ("b", "9")}
    generated = {(user, ("mail address", value)) for user, value in pairs}
    of_others = {("x", ("mail address", "5")), ("y", ("mail address", "5"))}
    found = coverage_of(train, others, (train[:4], others), (generated, of_others)).set_index("reach")
    within, across = found.loc["within"], found.loc["across"]
    assert (within["strings"], within["extracted"]) == (4, 3)  # b does not elicit 3
    assert (within["control_strings"], within["control_extracted"]) == (2, 1)  # 1 is data of a training user
    assert (across["strings"], across["extracted"]) == (4, 2)  # 3 by a and 4 by b
    assert (across["control_strings"], across["control_extracted"]) == (2, 1)  # 5 by b
    assert across["excess"] == 0.0


def test_extraction_of_personal_data_from_a_run(experiment: Experiment, flsim: Flsim) -> None:
    """Each of 30 authors has a mail address, and shares a telephone number with nine others."""
    posts = [
        (f"a{author}", f"please write to name{author}@site.org or call 030-12345{author // 10} today {word}.")
        for author in range(30)
        for word in ("once", "twice", "often", "again")
    ]
    corpus = experiment.folder / "posts"
    size = len({*"".join(text for _, text in posts)}) + 4
    how = ImportHParams(size, words_per_user=200, record_words=100, heldout=0.2, test=0.2, by="characters")
    import_corpus([write_jsonl(experiment.folder / "posts.jsonl", posts)], corpus, how)
    experiment.config.write_text(TINY.replace('"corpus"', f'"{corpus}"'))
    run = train_here(experiment, ("training.rounds=2", "canaries.count=1"))
    code, out, _ = flsim("extract", run, "--personal-data", "--json")
    assert code == 0
    (printed,) = json.loads(out)["runs"]
    rows: dict[Any, Any] = {(row["class"], row["reach"]): row for row in printed["rows"]}
    assert set(rows) == {
        (kind, reach) for kind in ("mail address", "telephone number") for reach in ("within", "across")
    }
    assert 0 < rows["mail address", "across"]["strings"] <= 24
    assert rows["mail address", "across"]["control_strings"] > 0
    assert rows["telephone number", "across"]["strings"] <= 3
    result = personal_data_of(run, None, AttackHParams(5))
    pd.testing.assert_frame_equal(api.extract_personal_data(run, records=5), result.frame)
    assert "5 prompts of training users and 5 of held-out users were continued." in to_text("run", result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--personal-data", "--edits", 1), "--personal-data: remove --prefix, --edits"),
        (("--names", "names.txt"), "--names names.txt: is for --personal-data; add it, or remove --names"),
        (("--personal-data", "--names", "nowhere"), "--names nowhere: cannot be read as text"),
    ],
)
def test_refusals_are_one_line(trained_here: Any, flsim: Flsim, options: tuple[object, ...], message: str) -> None:
    assert message in refusal(flsim, "extract", trained_here(), *options)


def test_a_file_without_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n \n")
    with pytest.raises(InputError, match="has no names; write a name on each line"):
        Finder.open(tmp_path / "names.txt")


TEXTS = {"train": ("ann", "bo"), "others": ("cy",)}


def test_personal_data_of_a_model_from_elsewhere(flsim: Flsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model always writes ann's address: ann's records elicit it within, and bo's records across."""
    monkeypatch.chdir(tmp_path)
    following = {"to": "ann", "ann": "@", "@": "site", "site": ".", ".": "org"}
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "from flsim import from_forward\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.table = torch.nn.Parameter(torch.zeros({LAYOUT.vocabulary_size}, {LAYOUT.vocabulary_size}))\n"
        f"        for word, after in {[(IDS[one], IDS[other]) for one, other in following.items()]}:\n"
        "            self.table.data[word, after] = 9\n"
        "    def forward(self, tokens):\n"
        "        return self.table[tokens]\n"
        "def load():\n"
        "    return from_forward(Net(), context=16)\n"
    )
    (tmp_path / "words.txt").write_text("\n".join(WORDS))
    for side, users in TEXTS.items():
        lines = [json.dumps({"who": user, "text": f"write to {user} @ site . org now"}) for user in users]
        (tmp_path / f"{side}.jsonl").write_text("\n".join(lines))
    changes = ("--set", "insertions=[1]", "--set", "count=2", "--set", "length=3")
    draw = ("--vocabulary", "words.txt", "--users", 2, "--records", 9, "--out", "planted")
    assert flsim("data", "canaries", *draw, *changes)[0] == 0
    how = ("--model", "model.py:load", "--canaries", "planted", "--references", "50", "--out", "theirs")
    code, _, err = flsim("evaluate", *how)
    assert code == 0, err
    personal = ("extract", "theirs", "--model", "model.py:load", "--personal-data")
    files = ("--members", "train.jsonl", "--non-members", "others.jsonl", "--user-column", "who")
    code, out, err = flsim(*personal, *files, "--json")
    assert code == 0, err
    found = {row["reach"]: row for row in json.loads(out)["runs"][0]["rows"]}
    assert [(row["extracted"], row["strings"]) for row in found.values()] == [(1, 2), (1, 2)]
    assert [(row["control_extracted"], row["control_strings"]) for row in found.values()] == [(0, 1), (0, 1)]
    assert "stores no text of users; name files of records with --members and --non-members" in refusal(
        flsim, *personal
    )


def test_personal_data_refuses_options_of_sampling(tmp_path: Path, flsim: Flsim) -> None:
    assert "--top-k: --personal-data decodes greedily" in refusal(
        flsim, "extract", tmp_path, "--personal-data", "--top-k", "5"
    )
