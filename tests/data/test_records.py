"""Batches and windows of records equal those that loops over lists make."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MakeCorpus
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import flsim
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.defences import DeduplicationHParams, deduplicate
from flsim.canaries.planting import occurring
from flsim.canaries.population import PlantedCorpus, plant_corpus
from flsim.data.corpus import Corpus, memory_map, rewrite_corpus
from flsim.data.inspect import inspect
from flsim.data.manifest import SPLITS, named
from flsim.data.records import Layout, Records, batch, windows

RECORD_WORDS = 5
LAYOUT = Layout(vocabulary_size=12, record_words=RECORD_WORDS)
records = st.lists(st.lists(st.integers(1, LAYOUT.oov), max_size=RECORD_WORDS), min_size=1, max_size=9)


def naive_batch(records: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return inputs (without the last token) and targets (without the first): BOS, words, and EOS of short records."""
    sequences = [[LAYOUT.bos, *record, *([LAYOUT.eos] if len(record) < RECORD_WORDS else [])] for record in records]
    time = max(len(sequence) - 1 for sequence in sequences)
    inputs, targets = (
        [part + [LAYOUT.pad] * (time - len(part)) for part in parts]
        for parts in ([s[:-1] for s in sequences], [s[1:] for s in sequences])
    )
    return np.array(inputs), np.array(targets)


@given(records, st.data())
def test_a_batch_equals_that_of_a_loop_over_records(records: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=12))
    made = batch(Records.from_lists(records), np.array(chosen), LAYOUT)
    inputs, targets = naive_batch([records[index] for index in chosen])
    np.testing.assert_array_equal(made.inputs, inputs)
    np.testing.assert_array_equal(made.targets, targets)
    assert made.inputs.dtype == made.targets.dtype == np.int64


@pytest.mark.parametrize(("dtype", "count", "overlap"), [("<u2", 1_000, 0), ("<u4", 1_001, 3), ("<i8", 154, 1)])
def test_pieces_cover_an_array_and_are_copies_of_a_mapped_file(
    tmp_path: Path, dtype: str, count: int, overlap: int
) -> None:
    values = np.arange(count, dtype=dtype)
    values.tofile(tmp_path / "values")
    mapped = memory_map(tmp_path / "values", dtype)
    pieces = list(windows(mapped, 77, overlap))
    assert [start for start, _ in pieces] == list(range(0, count, 77))
    for start, piece in pieces:
        assert piece.dtype == dtype
        assert not np.shares_memory(piece, mapped)
        assert piece.tolist() == values[start : start + 77 + overlap].tolist()


# Rewritten corpora have the records that are kept, of the same users, for any size of blocks.


def test_a_rewritten_corpus_has_the_kept_records(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    """The corpus has the kept records for 20 random masks, including none and all, and for 20 sizes of blocks."""
    rng = stream(0, "test", "rewriting")
    users = [[rng.integers(1, 9, rng.integers(0, 5)).tolist() for _ in range(rng.integers(0, 6))] for _ in range(15)]
    corpus = make_corpus(users, test=users[:3], heldout=users[5:])
    records = sum(map(len, users))
    for number, share in enumerate([0.0, 1.0, *rng.random(18)]):
        kept = rng.random(records) < share
        rest = iter(kept.tolist())
        expected = [[record for record in user if next(rest)] for user in users]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flsim.data.corpus.BLOCK", number + 1)
            made = rewrite_corpus(corpus, tmp_path / f"{number}", {"step": "test"}, kept=kept, dropped={"records_x": 4})
        train = Corpus.open(made.path, verify=True).split("train")
        assert [[record.tolist() for record in train[user]] for user in range(len(train))] == expected
        assert train.names == corpus.split("train").names
        for split in SPLITS[1:]:
            for file in (corpus.path / split).iterdir():
                assert (made.path / split / file.name).read_bytes() == file.read_bytes()
        assert made.manifest["dropped"] == {"records_x": 4}
        assert made.manifest["parameters"]["read"] == {"records": records}


def test_steps_notes_and_drops_add_up(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    corpus = make_corpus([[[1], [2], [3]]])
    kept = np.array([True, True, False])
    first = rewrite_corpus(corpus, tmp_path / "1", {"step": "a"}, kept=kept, dropped={"records_x": 1}, notes=["one"])
    second = rewrite_corpus(
        first, tmp_path / "2", {"step": "b"}, kept=kept[1:], dropped={"records_x": 1, "records_y": 0}, notes=["two"]
    )
    manifest = second.manifest
    assert manifest["dropped"] == {"records_x": 2, "records_y": 0}
    assert manifest["notes"] == ["one", "two"]
    assert manifest["parameters"]["steps"] == [
        {"step": "a", "corpus": corpus.digest},
        {"step": "b", "corpus": first.digest},
    ]
    assert manifest["parameters"]["read"] == {"records": 3}
    with pytest.raises(InputError, match="already exists"):
        rewrite_corpus(corpus, tmp_path / "2", {})


SIZE = 70_000  # token ids
WORDS = SIZE - 4
RECORD = 300  # words
USERS = 24
BEYOND = 2**16  # the first id that uint16 does not hold
CANARIES = flsim.Canaries(p_u=(0.25,), p_e=(0.25,), count=12)
READER = """
import json


def lines(path):
    with path.open(encoding="utf-8") as file:
        for line in file:
            user = json.loads(line)
            yield user["user"], user["sentences"], user["split"]
"""


def records_of(user: int) -> list[str]:
    """Return a share of all words as records; for user 1, the last record is repeated."""
    own = [f"w{word:05d}" for word in range(user, WORDS, USERS)]
    records = [" ".join(own[first : first + RECORD]) for first in range(0, len(own), RECORD)]
    return [*records, records[-1]] if user == 1 else records


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("wide")
    dump, reader = folder / "dump.jsonl", folder / "reader.py"
    users = [{"user": f"u{user:02d}", "split": "train", "sentences": records_of(user)} for user in range(USERS)]
    users.append({"user": "tester", "split": "test", "sentences": records_of(2)[-1:]})
    dump.write_text("".join(json.dumps(user) + "\n" for user in users), encoding="utf-8")
    reader.write_text(READER, encoding="utf-8")
    settings = flsim.ImportSettings(SIZE, RECORD, words_per_user=None)
    return flsim.import_corpus([dump], folder / "corpus", settings, f"{reader}:lines")


def test_an_import_reads_back_as_its_dump(wide: Corpus) -> None:
    train, files = wide.split("train"), wide.manifest["files"]
    layout = {"vocabulary_size": SIZE, "record_words": RECORD, "name": "tff", "tokens": "uint32"}
    assert wide.manifest["layout"] == layout
    assert set(files) == set(named(wide.layout))
    assert files["train/tokens.u32"]["bytes"] == 4 * train.words
    assert train.tokens.dtype == np.uint32
    assert int(train.tokens.max()) == WORDS
    for user in range(USERS):
        index = train.names.index(f"u{user:02d}")
        assert [" ".join(wide.vocabulary.decode(record.tolist())) for record in train[index]] == records_of(user)
    assert inspect(wide)["splits"]["train"]["words_occurring"] == WORDS


def test_phrases_of_words_with_large_ids_are_found(wide: Corpus) -> None:
    train = wide.split("train")
    last = int(np.flatnonzero(train.tokens == WORDS)[0])
    phrase, other = tuple(train.tokens[last - 2 : last + 1].tolist()), (WORDS, WORDS - BEYOND, WORDS)
    assert occurring(train, {phrase, other}) == {phrase}


def test_planted_canaries_are_written_and_duplicates_are_dropped(wide: Corpus, tmp_path: Path) -> None:
    less = deduplicate(wide, tmp_path / "less", DeduplicationHParams())
    assert less.manifest["dropped"]["records_duplicated"] == 1
    planted = PlantedCorpus.read(plant_corpus(less, tmp_path / "planted", CANARIES, seed=0))
    assert planted is not None
    overlay, train = planted.planting.overlay, Corpus.open(tmp_path / "planted").split("train")
    phrases = [canary.tokens for canary in planted.planting.canaries]
    records = train.records_at(overlay.records)
    assert [tuple(record.tolist()) for record in records] == [phrases[canary] for canary in overlay.canaries]
    assert int(records.tokens.max()) >= BEYOND


def test_a_round_and_its_measures_use_large_ids(wide: Corpus) -> None:
    planted = flsim.plant(wide, CANARIES, partition="iid")
    users = planted.users
    assert int(users.records_at(users.overlay.records).tokens.max()) >= BEYOND
    assert np.diff(users.records_at(np.arange(users.records)).offsets).max() == RECORD
    model = flsim.Model(embedding=4, units=4)
    algorithm = flsim.FedAvg(cohort=2, local=flsim.LocalSGD(batch_size=2, max_records=2, learning_rate=1.0))
    (state,) = flsim.simulate(planted, model, algorithm, rounds=1)
    oracle = algorithm.config(planted, model, 1, 0).training_of(planted.users, 1)
    assert isinstance(oracle, FederatedTraining)
    (first,) = replace(oracle, engine="local").states(oracle.first_state(), 1)
    for name, value in first.params.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-4, atol=1e-6)
    rows = flsim.evaluate(state, planted, model, references=20)
    assert {*rows["canary"]} == {"", *(canary.id for canary in planted.canaries)}
    assert np.isfinite(rows["value"]).all()


def test_a_manifest_of_another_type_is_refused(wide: Corpus, tmp_path: Path) -> None:
    text = (wide.path / "manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    for layout in (
        {**manifest["layout"], "vocabulary_size": 600},
        {name: value for name, value in manifest["layout"].items() if name != "tokens"},
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"layout": layout}), encoding="utf-8")
        with pytest.raises(InputError, match=r"manifest has tokens of type uint(16|32), but"):
            Corpus.open(tmp_path)
