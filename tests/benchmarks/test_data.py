"""The benchmark of imports measures what it says, at a size that a test can afford."""

from pathlib import Path

import pytest

from benchmarks.data import FILES, examples
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus


@pytest.mark.parametrize("reader", FILES)
def test_files_hold_all_sentences(reader: str, tmp_path: Path) -> None:
    name, write = FILES[reader]
    write(tmp_path / name, examples(1_000))
    hparams = ImportHParams(vocabulary_size=500, words_per_user=100, heldout=0.0, test=0.0)
    corpus = import_corpus([tmp_path / name], tmp_path / "corpus", hparams)
    assert corpus.manifest["sources"][0]["format"] == reader.split(",")[0]
    assert corpus.manifest["parameters"]["read"]["records"] == 1_000
