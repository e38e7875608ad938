"""The benchmark of imports measures what it says, at a size that a test can afford."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.data import FILES, PER_USER, examples
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus


def test_generated_sentences_are_those_of_users_of_the_mean_size() -> None:
    found = list(examples(1_000))
    assert Counter(client for _, client, _ in found) == {"00000001": PER_USER, "00000002": PER_USER, "00000003": 200}
    assert found == list(examples(1_000))
    assert {split for split, _, _ in found} == {"train"}
    lengths = [len(tokens.split(" ")) for _, _, tokens in found]
    assert (min(lengths), max(lengths)) == (5, 20)  # 4 to 18 words, a full stop, and in each twentieth a rare word
    assert len({tokens for _, _, tokens in found}) > 900


@pytest.mark.parametrize("reader", FILES)
def test_files_hold_all_sentences(reader: str, tmp_path: Path) -> None:
    name, write = FILES[reader]
    write(tmp_path / name, examples(1_000))
    hparams = ImportHParams(vocabulary_size=500, words_per_user=100, heldout=0.0, test=0.0)
    corpus = import_corpus([tmp_path / name], tmp_path / "corpus", hparams)
    assert corpus.manifest["sources"][0]["format"] == reader.split(",")[0]
    assert corpus.manifest["parameters"]["read"]["records"] == 1_000
