"""Corpora of more than 65,536 token ids, and of records longer than 255 words, from a dump to what is measured."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flsim
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import InputError
from flsim.canaries.in_corpus import Planted, plant_corpus
from flsim.canaries.planting import occurring
from flsim.data.corpus import Corpus
from flsim.data.inspect import inspect
from flsim.data.manifest import named
from flsim.defences import DeduplicationHParams, deduplicate

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
    """A share of all words; the last of user 1 repeats one."""
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


def test_phrases_of_late_words_are_noticed(wide: Corpus) -> None:
    train = wide.split("train")
    last = int(np.flatnonzero(train.tokens == WORDS)[0])
    phrase, other = tuple(train.tokens[last - 2 : last + 1].tolist()), (WORDS, WORDS - BEYOND, WORDS)
    assert occurring(train, {phrase, other}) == {phrase}


def test_what_is_planted_is_written_and_repeats_are_dropped(wide: Corpus, tmp_path: Path) -> None:
    less = deduplicate(wide, tmp_path / "less", DeduplicationHParams())
    assert less.manifest["dropped"]["records_duplicated"] == 1
    planted = Planted.read(plant_corpus(less, tmp_path / "planted", CANARIES, seed=0))
    assert planted is not None
    overlay, train = planted.planting.overlay, Corpus.open(tmp_path / "planted").split("train")
    phrases = [canary.tokens for canary in planted.planting.canaries]
    records = train.records_at(overlay.records)
    assert [tuple(record.tolist()) for record in records] == [phrases[canary] for canary in overlay.canaries]
    assert int(records.tokens.max()) >= BEYOND


def test_a_round_and_what_it_memorized(wide: Corpus) -> None:
    planted = flsim.plant(wide, CANARIES, partition="iid")
    users = planted.users
    copies = users.records_at(users.overlay.records)
    assert int(copies.tokens.max()) >= BEYOND
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
