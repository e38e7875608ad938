"""Prompts are read with their answers and copied with records, and are never targets of training or utility.

The expected loss follows from its definition: the sum of -log p of the answer's tokens and EOS, one after another,
each given BOS, the prompt and the answer so far.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import Flsim

from flsim.algorithms.rounds import LocalEngine, engine_of
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.planting import draw_canaries
from flsim.canaries.population import Population, plant_corpus
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus, PartialSplit, Split
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.tasks import import_corpus
from flsim.data.records import Layout, Records, batch
from flsim.measures.prediction import utility
from flsim.models.architectures import CIFGLanguageModel, ModelHParams
from flsim.runs.evaluate import Checked
from flsim.training.central import CentralHParams
from flsim.training.central.training import AutogradEngine, CentralTask
from flsim.training.central.training import engine_of as central_engine_of
from flsim.training.update import LocalHParams, State

HPARAMS = ImportHParams(vocabulary_size=270, record_words=20, words_per_user=None, heldout=0, test=0, by="tokens")
ROWS = [("a", "Ask one", "Answer one."), ("a", None, "No prompt."), ("b", "Ask two", "Answer two."), ("b", "x", None)]
LAYOUT = Layout(12, record_words=6, prompts=True)
MODEL = CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(3, 5)).initialize(0).double()
RECORDS = [[1, 2, 3], [4], [5, 6, 7, 8, 1, 2], [3, 3], [8, 1, 4, 4]]
PROMPTS = [2, 0, 3, 1, 3]  # lengths in tokens


def written(path: Path) -> Path:
    keys = ("user", "ask", "text")
    if path.suffix == ".csv":
        with path.open("w") as file:
            csv.writer(file).writerows([keys, *ROWS])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(keys, map(list, zip(*ROWS, strict=True)), strict=True))), path)
    else:
        rows = [dict(zip(keys, row, strict=True)) for row in ROWS]
        lines = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
        path.write_text(lines)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_prompts_and_answers_are_read(suffix: str, tmp_path: Path) -> None:
    """A row with a null answer is dropped; a null prompt is read as no prompt."""
    made = import_corpus([written(tmp_path / f"a.{suffix}")], tmp_path / "c", HPARAMS, prompt_column="ask")
    train = Corpus.open(made.path, verify=True).split("train")
    found = []
    for user, name in enumerate(train.names):
        records = train[user]
        assert records.prompts is not None
        for record, prompt in zip(records, records.prompts, strict=True):
            halves = record[:prompt].tolist(), record[prompt:].tolist()
            found.append((name, *map(made.vocabulary.text, halves)))
    assert sorted(found) == sorted((user, ask or "", text) for user, ask, text in ROWS if text)
    assert made.manifest["dropped"]["posts_without_text"] == 1


def test_prompts_and_answers_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """Too long prompts and cut tokens are counted in tokens of the tokenizer; a long text is split at 20 tokens."""
    rng = stream(0, "test", "long prompts")
    prompts = ["".join(rng.choice([*"abcdefgh0123456789"], length)) for length in range(10, 30)]
    rows = [("a", prompt, prompt[:-4]) for prompt in prompts] + [("a", "", "begin " * 40)]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(json.dumps({"user": u, "ask": q, "text": t}) for u, q, t in rows))
    made = import_corpus([source], tmp_path / "c", replace(HPARAMS, vocabulary_size=275), prompt_column="ask")
    assert made.token_map is not None
    encode = made.token_map.tokenizer.encode
    sizes = [(len(encode(prompt)), len(encode(prompt)) + len(encode(text))) for _, prompt, text in rows[:-1]]
    long = [prompt >= 20 for prompt, _ in sizes]
    assert 0 < sum(long) < len(long)
    cut = [size - 20 for (_, size), is_long in zip(sizes, long, strict=True) if size > 20 and not is_long]
    assert sum(cut)
    dropped, records = made.manifest["dropped"], made.split("train")[0]
    assert (dropped["records_with_long_prompts"], dropped["tokens_truncated"]) == (sum(long), sum(cut))
    of_text = len(encode("begin " * 40))
    expected = [min(size, 20) for (_, size), is_long in zip(sizes, long, strict=True) if not is_long]
    expected += [20] * (of_text // 20) + [of_text % 20] * (of_text % 20 > 0)
    assert [len(record) for record in records] == expected


def test_sources_without_prompts_or_with_too_long_ones_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"user": u, "ask": "Ask one", "text": "One."}) + "\n" for u in range(20)))
    with pytest.raises(InputError, match="a prompt must be shorter than --words-per-record 1"):
        import_corpus(
            [source], tmp_path / "c", replace(HPARAMS, record_words=1, vocabulary_size=266), prompt_column="ask"
        )
    (tmp_path / "a.txt").write_text("a b\nc d\n")
    with pytest.raises(InputError, match="--prompt-column is for jsonl, json, csv, parquet, and this is text"):
        import_corpus([tmp_path / "a.txt"], tmp_path / "c", HPARAMS, prompt_column="ask")
    (tmp_path / "leaf.json").write_text(json.dumps({"users": ["a"], "user_data": {"a": {"x": ["b c"]}}}))
    with pytest.raises(InputError, match="LEAF's layout, which has no prompts"):
        import_corpus([tmp_path / "leaf.json"], tmp_path / "c", HPARAMS, prompt_column="ask")


LENGTHS = np.array(PROMPTS, np.uint32)
RECORDS_OF_ONE = replace(Records.from_lists(RECORDS), prompts=LENGTHS)
ONE_USER = Split(LAYOUT, RECORDS_OF_ONE.tokens, RECORDS_OF_ONE.offsets, np.array([0, 5]), Path("nowhere"), LENGTHS)


def sequences() -> Iterator[tuple[list[int], int]]:
    """Yield each record as BOS, tokens, and EOS if it has fewer than 6 tokens; and the length of its prompt."""
    for record, prompt in zip(RECORDS, PROMPTS, strict=True):
        yield [LAYOUT.bos, *record, *([LAYOUT.eos] if len(record) < 6 else [])], prompt


def slow_loss() -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of all answers, token by token, and the number of these tokens."""
    total, count = torch.zeros(()), 0
    for sequence, prompt in sequences():
        log_probs = MODEL(torch.tensor([sequence[:-1]]))[0].log_softmax(-1)
        for place in range(prompt, len(sequence) - 1):
            total, count = total - log_probs[place, sequence[place + 1]], count + 1
    return total, count


def test_targets_are_the_answer() -> None:
    """The expected batch is written out for the first two records, `[1, 2 | 3]` and `[4]`, with BOS 10 and EOS 11."""
    read = batch(RECORDS_OF_ONE, np.array([0, 1]), LAYOUT)
    assert read.inputs.tolist() == [[10, 1, 2, 3], [10, 4, 0, 0]]
    assert read.targets.tolist() == [[0, 0, 3, 11], [4, 11, 0, 0]]


def test_every_federated_engine_trains_only_on_answers() -> None:
    """A user's SGD step over all records follows the gradient of the slow loss; "cohort" also gives a local engine."""
    hparams = LocalHParams(batch_size=5, learning_rate=0.3)
    named = MODEL.trainable
    slow, count = slow_loss()
    gradients = dict(zip(named, torch.autograd.grad(slow / count, list(named.values())), strict=True))
    start = {name: value.detach().clone() for name, value in named.items()}

    for name in ("local", "cohort"):
        model = CIFGLanguageModel(LAYOUT.vocabulary_size, ModelHParams(3, 5)).double()
        engine = engine_of(name, model, LAYOUT, hparams)
        assert isinstance(engine, LocalEngine)
        total = engine.train(start, ONE_USER, [0], 0, 0)
        for key, value in total.delta.items():  # weighted by examples
            torch.testing.assert_close(value / 5, -0.3 * gradients[key], rtol=1e-6, atol=1e-9)


def test_central_training_trains_only_on_answers() -> None:
    params = {name: value.detach().clone() for name, value in MODEL.trainable.items()}
    task = CentralTask(ONE_USER, CentralHParams(batch_size=5, learning_rate=0.1), 0)
    engine = central_engine_of(task, State(0, params))
    assert isinstance(engine, AutogradEngine)
    (loss,), (tokens,) = engine.train(engine.pack(task.chunk(0, 1)))
    slow, count = slow_loss()
    assert tokens == count
    assert loss == pytest.approx(slow.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(slow / tokens, [MODEL.trainable["projection"]])
    torch.testing.assert_close(engine.params()["projection"], params["projection"] - 0.1 * gradient)


def test_utility_counts_only_answers() -> None:
    measured = utility(MODEL, ONE_USER)
    slow, count = slow_loss()
    assert measured.cross_entropy == pytest.approx(slow.item(), rel=1e-12)
    assert measured.tokens == count
    by_steps = utility(Checked(MODEL, LAYOUT, "ours"), ONE_USER)
    assert by_steps.cross_entropy == pytest.approx(measured.cross_entropy, rel=1e-12)
    assert replace(by_steps, cross_entropy=0.0) == replace(measured, cross_entropy=0.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("prompts")
    rng = stream(0, "test", "prompts")
    words = [f"{start}{end}" for start in ("ba", "de", "ki", "lo", "mu", "ra", "so", "te") for end in "abcdef"]
    rows = [
        {
            "user": f"a{number % 12}",
            "ask": " ".join(rng.choice(words, rng.integers(1, 4))),
            "text": " ".join(rng.choice(words, rng.integers(1, 9))),
        }
        for number in range(120)
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hparams = replace(HPARAMS, heldout=0.2, test=0.2, vocabulary_size=300)
    return import_corpus([folder / "a.jsonl"], folder / "corpus", hparams, prompt_column="ask")


def prompts_of(split: Split | Population) -> list[tuple[list[int], int]]:
    """Return the records of all users, one user after another, with the lengths of their prompts in tokens."""
    listed = []
    for user in range(len(split)):
        records = split[user]
        assert records.prompts is not None
        listed += [(record.tolist(), int(prompt)) for record, prompt in zip(records, records.prompts, strict=True)]
    return listed


def test_a_canary_is_an_answer_without_a_prompt(corpus: Corpus, tmp_path: Path) -> None:
    """A canary in a planted corpus is an answer without a prompt, and other records keep their prompts."""
    hparams = CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=3)
    made = plant_corpus(corpus, tmp_path / "planted", hparams, 0)
    before, after = prompts_of(corpus.split("train")), prompts_of(made.split("train"))
    phrases = {canary.tokens for canary in draw_canaries(corpus, hparams, 0)}
    replaced = [place for place, (record, _) in enumerate(after) if tuple(record) in phrases]
    assert len(replaced) > 5
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new[1] == 0 if place in replaced else new == old
    assert made.vocabulary.text([1, 2]) == corpus.vocabulary.text([1, 2])


def test_parts_of_a_split_keep_prompts(corpus: Corpus) -> None:
    train = corpus.split("train")
    positions = np.array([0, 3, 7, 8, 20], np.uint32)
    listed = prompts_of(train)
    assert prompts_of(PartialSplit.select(train, positions)) == [listed[place] for place in positions.tolist()]
    joined = Records.joined([train[0], Records.from_lists([[1]]), train[1]])
    assert joined.prompts is not None
    assert joined.prompts.tolist() == [prompt for _, prompt in prompts_of(train)[: len(train[0])]] + [0] + [
        prompt for _, prompt in listed[len(train[0]) : len(train[0]) + len(train[1])]
    ]


def test_natural_canaries_are_answers(corpus: Corpus) -> None:
    """A canary from a held-out record begins at the first word after the prompt, and has no word of the prompt."""
    drawn = draw_canaries(corpus, CanaryHParams(p_u=(0.5,), p_e=(0.5,), count=5, length=5, source="heldout"), 0)
    answers = {tuple(record[prompt : prompt + 5]) for record, prompt in prompts_of(corpus.split("heldout"))}
    assert {canary.tokens for canary in drawn} <= answers


def test_a_corpus_describes_its_prompts(corpus: Corpus, flsim: Flsim) -> None:
    listed = prompts_of(corpus.split("train"))
    share = sum(prompt for _, prompt in listed) / sum(len(record) for record, _ in listed)
    code, out, _ = flsim("data", "inspect", corpus.path)
    assert code == 0
    assert f"prompts      {share:.1%} of train's words are of prompts" in out
    assert f"({corpus.layout.words} complete words)" in out
