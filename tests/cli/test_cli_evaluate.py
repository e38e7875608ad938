"""Tests of `flsim evaluate` with a custom model, and of the page about it, which is executed as written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers import Experiment, Flsim

from flsim.base.errors import InputError
from flsim.canaries.planting import read_listed
from flsim.data.records import Layout, Vocabulary

PAGE = Path(__file__).parents[2] / "docs" / "auditing.md"

MODEL = """
import torch
from neighbour import V
print("loading")

class Uniform:
    def start(self, tokens):
        return (tokens[:, 0],), torch.full((len(tokens), V), 1 / V).log()
    def step(self, state, tokens):
        return state, torch.full((len(tokens), V), 1 / V).log()

class NaN(Uniform):
    def start(self, tokens):
        return (tokens[:, 0],), torch.full((len(tokens), V), torch.nan)

def fails():
    raise KeyError("weights")
def leaves():
    raise SystemExit(0)
def nothing():
    pass
none = 3
"""


@pytest.fixture
def flsim(flsim: Flsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Flsim]:
    """Return the command in this process, in a folder with two canaries and a model of 40 tokens, 36 of them words."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "neighbour.py").write_text("V = 40")
    (tmp_path / "words.txt").write_text("".join(f"w{index}\n" for index in range(36)))
    (tmp_path / "canaries.csv").write_text("id,words,p_u,p_e\nb,w1 w2 w3,0.05,1\na,w35 w0 w1,,\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    yield partial(flsim, "evaluate")
    for name in [name for name in sys.modules if name in ("neighbour", "mine") or name.startswith("_own_")]:
        del sys.modules[name]


COMMON = ("--canaries", "canaries.csv", "--vocabulary", "words.txt", "--references", "50")


@pytest.mark.parametrize("spec", ["mine:Uniform", "./mine.py:Uniform"])
def test_a_model_is_found_by_path_and_by_name(flsim: Flsim, spec: str) -> None:
    """All 51 phrases are equally likely, 40^-2 each; what the model's code prints is not between the results."""
    code, out, err = flsim("--model", spec, *COMMON, "--json")
    assert (code, "loading" in err) == (0, True)
    rows = json.loads(out)
    assert {(row["run"], row["round"]) for row in rows} == {(spec, 0)}
    values = {(row["metric"], row["canary"]): row["value"] for row in rows}
    assert values["log_perplexity", "a"] == pytest.approx(7.37776, rel=1e-5)
    expected = {("rank", 51.0), ("exposure", 0.0), ("rs", 0.0)}
    assert expected <= {(metric, value) for (metric, canary), value in values.items() if canary == "b"}
    assert values["references", ""] == 50
    assert len(rows) == 11


def test_the_table_has_a_line_for_each_canary(flsim: Flsim) -> None:
    code, out, _ = flsim("--model", "mine.py:Uniform", *COMMON)
    assert code == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert [lines[0], *lines[2:4]] == [
        ["Canary", "p_u", "p_e", "Nats", "Rank", "Bits", "RS", "BS"],
        ["a", "", "", "7.38", "51", "0.0", "no", "no"],
        ["b", "1/20", "100%", "7.38", "51", "0.0", "no", "no"],
    ]
    assert max(map(len, out.splitlines())) <= 80


def test_tokens_instead_of_words_and_a_corpus_for_utility(flsim: Flsim, experiment: Experiment) -> None:
    """The perplexity of a uniform model is V."""
    listed = experiment.folder / "c.json"
    listed.write_text(json.dumps([{"id": "x", "tokens": [1, 36, 2]}]))
    _, out, _ = flsim(
        "--model", "mine.py:Uniform", "--canaries", listed, "--vocabulary", 40, "--references", 9, "--json"
    )
    assert "perplexity" not in {row["metric"] for row in json.loads(out)}
    settings = ("--corpus", "corpus", "--references", 9, "--test-users", 2)
    _, out, _ = flsim("--model", "mine.py:Uniform", "--canaries", listed, *settings, "--json")
    assert {row["metric"]: row["value"] for row in json.loads(out)}["perplexity"] == pytest.approx(40)
    assert "Perplexity 40.0" in flsim("--model", "mine.py:Uniform", "--canaries", listed, *settings)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "mine.py"], "--model mine.py: name a factory"),
        (["--model", "mine.py:load"], "mine.py has no function load"),
        (["--model", "mine.py:fails"], "--model mine.py:fails: failed with KeyError: 'weights' (mine.py:17)"),
        (["--model", "mine.py:nothing"], "returned a NoneType, which has no method start"),
        (["--model", "mine.py:NaN"], "mine.py:NaN: start returned log-probs that are NaN"),
        (["--model", "mine.py:Uniform", "--vocabulary", "41"], "the vocabulary requires [2, 41]"),
        (["--model", "mine.py:Uniform", "--prefix", "3"], "a prefix of 3 covers all words of canary"),
        (["--model", "mine.py:Uniform", "--run", "run"], "--run: this option is for a checkpoint"),
        (["--model", "mine.py:Uniform", "one.safetensors"], "name either a checkpoint"),
        ([], "name either a checkpoint"),
        (["one.safetensors"], "--canaries, --vocabulary, --references: these options are for --model"),
    ],
)
def test_bad_input_is_one_line(flsim: Flsim, experiment: Experiment, arguments: list[str], message: str) -> None:
    """If an option is given twice, the last value counts."""
    if "--vocabulary" in arguments:
        (experiment.folder / "canaries.csv").write_text("id,tokens\na,1 2 3\n")
    code, out, err = flsim(*COMMON, *arguments)
    said = [line for line in err.splitlines() if line != "loading"]
    assert (code, out, len(said)) == (2, "", 1)
    assert message in said[0]


WORDS = Vocabulary(("a", "b", "c"), (0, 0, 0))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.csv", "id,words\nx,a d\n", 'canary 1: "d" is not in the vocabulary'),
        ("c.csv", "id,words\nx,a b\nx,b a\n", "canary x is listed twice"),
        ("c.csv", "id,words,tokens\nx,a b,1 2\n", "must have words or tokens, not both"),
        ("c.csv", "id,tokens\nx,1 two\n", "tokens must be an integer, found 'two'"),
        ("c.csv", "id,tokens\nx,1 4\n", "token 4 is not the id of a word; word ids are 1 to 3"),
        ("c.csv", "id,tokens\ny,3\nx,1 2 3,2 1\n", "canary 2: has more fields than the header; quote a field"),
        ("c.csv", "id,words,p_u\nx,a b,2\n", "canary 1: p_u must be at most 1, found '2'"),
        ("c.json", '{"id": "x"}', "must be a list of objects"),
        ("c.json", "[", "cannot be read as .json"),
        ("c.txt", "x a b", "canaries must be in a .csv or .json file"),
    ],
)
def test_wrong_lists_of_canaries_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        read_listed(tmp_path / name, Layout(7), WORDS)
    with pytest.raises(InputError, match="cannot be read"):
        read_listed(tmp_path / f"missing-{name.replace('txt', 'csv')}", Layout(7), WORDS)


def test_csv_and_json_list_the_same(tmp_path: Path) -> None:
    """A quoted field may contain line separators; an id keeps U+2028, which does not end a line of CSV."""
    text = f'id,words,tokens,p_u,p_e\r\nx,"a\nb\u2028c",,0.5,1\ny{chr(0x2028)}1,,3 1,0.1,0.2\n'
    (tmp_path / "c.csv").write_bytes(text.encode("utf-8-sig"))
    one = {"id": "x", "words": ["a", "b", "c"], "p_u": 0.5, "p_e": 1}
    other = {"id": f"y{chr(0x2028)}1", "tokens": [3, 1], "p_u": 0.1, "p_e": 0.2}
    (tmp_path / "c.json").write_text(json.dumps([one, other]))
    listed = [read_listed(tmp_path / name, Layout(7), WORDS) for name in ("c.csv", "c.json")]
    assert listed[0] == listed[1]
    assert [(canary.id, canary.tokens) for canary in listed[0]] == [("x", (1, 2, 3)), (f"y{chr(0x2028)}1", (3, 1))]


@pytest.mark.slow
def test_the_page_finds_the_planted_phrase_in_a_transformer_and_no_other(tmp_path: Path) -> None:
    """The page's files are written, its commands run, and their output is compared, except numbers of controls."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    files = dict(blocks[:4])
    (tmp_path / "model.py").write_text(files["python"])
    (tmp_path / "canaries.csv").write_text(files["csv"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-ec", files["sh"]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    found, shown = (
        {cells[0]: cells[1:] for line in text.splitlines() if len(cells := line.replace("|", " ").split()) == 6}
        for text in (done.stdout, files["text"])
    )
    assert found["planted"][1:] == ["1", "14.3", "yes", "yes"]
    for name in ("Canary", "planted"):
        assert found[name][1:] == shown[name][1:]
    for name in ("never1", "never2"):
        assert found[name][-2:] == ["no", "no"]
    assert found.keys() >= shown.keys()
