"""An import keeps the complete text of test and held-out authors, and runs measure utility on this text."""

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dumps import folder_bytes, write_jsonl
from helpers import TINY
from helpers import rows as rows_of
from shown import over_seeds, to_latex, to_markdown

from flsim.algorithms import checkpoint
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.canaries.defences import DeduplicationHParams, deduplicate
from flsim.canaries.planting import draw_canaries
from flsim.canaries.population import plant_corpus
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.importing.gather import ImportHParams, split_of
from flsim.data.importing.tasks import import_corpus
from flsim.data.manifest import SPLITS, WHOLE
from flsim.data.records import Records
from flsim.data.stores import fetched
from flsim.report.gather import gather
from flsim.report.page import render
from flsim.results.rows import read_run
from flsim.results.tables import memorization_table
from flsim.runs.config import load
from flsim.runs.folder import Run, evaluate_checkpoint

SHARE, WORDS_PER_USER, RECORD_WORDS, VOCABULARY = 0.25, 60, 8, 34
SETTINGS = ImportHParams(VOCABULARY, RECORD_WORDS, WORDS_PER_USER, heldout=SHARE, test=SHARE)
Sentences = list[list[str]]


@dataclass(frozen=True)
class Imported:
    """The sentences of each author, the file with these sentences, and the corpus that was imported from the file."""

    texts: dict[str, Sentences]
    source: Path
    corpus: Corpus

    def authors_of(self, split: str) -> list[str]:
        return [author for author in self.texts if split_of(author, SHARE, SHARE, 0) == split]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """Import sixty authors with 1 to 40 sentences of 1 to 12 words; most have too few words for a balanced user."""
    folder = tmp_path_factory.mktemp("whole")
    rng = stream(0, "test", "whole authors")
    texts: dict[str, Sentences] = {}
    for author in range(60):
        sentences = int(min(40, rng.zipf(1.5)))
        texts[f"author{author}"] = [
            [*(f"w{min(word, 60)}" for word in rng.zipf(1.3, rng.integers(1, 13)).tolist()), "."]
            for _ in range(sentences)
        ]
    posts = [(author, " ".join(" ".join(words) for words in text)) for author, text in texts.items()]
    source = write_jsonl(folder / "posts.jsonl", posts)
    return Imported(texts, source, import_corpus([source], folder / "corpus", SETTINGS, workers=1))


def naive_utility(run: Run, path: Path, records: Iterable[list[int]]) -> tuple[float, float]:
    """Return accuracy and perplexity, for one record and target at a time, with the logits of the model's forward."""
    layout, losses, hits = run.corpus.layout, [], []
    model = checkpoint.model_of(run.provenance).load(run.load(path).params).double()
    for record in records:
        sequence = [layout.bos, *record] + [layout.eos] * (len(record) < layout.record_words)
        with torch.no_grad():
            logits = model(torch.tensor([sequence]))[0].numpy()
        for scores, target in zip(logits[:-1], sequence[1:], strict=True):
            losses.append(math.log(np.exp(scores).sum()) - scores[target])
            if target not in (layout.oov, layout.eos):
                hits.append(int(np.argmax(scores)) == target)
    return float(np.mean(hits)), math.exp(np.mean(losses))


def encoded(corpus: Corpus, text: Sentences) -> list[list[int]]:
    ids = corpus.vocabulary.ids
    return [[ids.get(word, corpus.layout.oov) for word in sentence[:RECORD_WORDS]] for sentence in text]


def evaluated(folder: Path, corpus: Corpus, *overrides: str) -> tuple[Run, Path]:
    """Return a run on a corpus, whose model was not trained, and its evaluated checkpoint."""
    folder.mkdir()
    config = folder / "tiny.toml"
    config.write_text(TINY)
    run = Run.create(load(config, [f"data.corpus={corpus.path}", "canaries.length=3", *overrides]), folder / "run")
    path = run.save(replace(run.latest_state(), round=4))
    evaluate_checkpoint(run.path, path)
    run.mark("completed")
    return run, path


def measured(run: Run) -> dict[str, float]:
    rows = rows_of(run.path)
    return dict(zip(rows[rows.canary == ""].metric, rows[rows.canary == ""].value, strict=True))


def test_an_import_that_cuts_no_author_has_no_splits_of_whole_authors(imported: Imported, tmp_path: Path) -> None:
    settings = ImportHParams(VOCABULARY, RECORD_WORDS, None, heldout=SHARE, test=SHARE)
    corpus = import_corpus([imported.source], tmp_path / "corpus", settings, workers=1)
    assert corpus.splits == SPLITS
    assert sorted(corpus.test_users.names) == sorted(imported.authors_of("test"))


@pytest.mark.parametrize("cap", [None, 5])
def test_a_run_measures_utility_on_whole_authors(imported: Imported, tmp_path: Path, cap: int | None) -> None:
    """A limit draws this number of authors, each with the same probability, and with all records of the author."""
    run, path = evaluated(tmp_path / "a", imported.corpus, *([f"evaluation.test_users={cap}"] if cap else []))
    authors = run.corpus.split("test-whole").names
    assert sorted(authors) == sorted(imported.authors_of("test"))
    drawn = stream(run.config.seed, "test users").choice(len(authors), cap or len(authors), replace=False)
    texts = [imported.texts[authors[index]] for index in drawn]
    records = [record for text in texts for record in encoded(imported.corpus, text)]
    values = measured(run)
    assert values["whole_test_users"] == len(texts)
    expected = naive_utility(run, path, records)
    assert (values["accuracy"], values["perplexity"]) == pytest.approx(expected, rel=1e-5)


def test_tables_and_reports_state_the_number_of_complete_test_authors(imported: Imported, tmp_path: Path) -> None:
    run, _ = evaluated(tmp_path / "whole", imported.corpus)
    authors, whole = len(imported.authors_of("test")), read_run(run.path)
    table = memorization_table([whole])
    assert table["whole_test_users"].tolist() == [authors]
    for written in (to_markdown(table), to_latex(table), to_markdown(over_seeds([whole])), render(gather([run.path]))):
        assert f"{authors} complete test authors" in " ".join(written.split())


def test_rewritten_corpora_have_the_same_whole_authors(imported: Imported, tmp_path: Path) -> None:
    hparams = CanaryHParams(p_u=(0.5,), p_e=(1.0,), count=2, length=3)
    planted = plant_corpus(imported.corpus, tmp_path / "planted", hparams, seed=1)
    last = deduplicate(planted, tmp_path / "deduplicated", DeduplicationHParams())
    assert last.splits == imported.corpus.splits == (*SPLITS, *WHOLE.values())
    for split in WHOLE.values():
        assert folder_bytes(last.path / split) == folder_bytes(imported.corpus.path / split)


def test_no_canary_is_text_of_a_whole_author(imported: Imported, tmp_path: Path) -> None:
    """If a test author's complete text has the first phrase, another phrase replaces it; other canaries are equal."""
    corpus, hparams = imported.corpus, CanaryHParams(p_u=(0.5,), p_e=(1.0,), count=3, length=5)
    before = draw_canaries(corpus, hparams, 4)
    path = tmp_path / "corpus"
    path.mkdir()
    with CorpusWriter(path, corpus.vocabulary, corpus.layout, corpus.splits) as writer:
        writer.splits["test-whole"].add("someone", Records.from_lists([[1, *before[0].tokens]]))
        writer.finish({}, [], {})
    after = draw_canaries(Corpus.open(path), hparams, 4)
    assert after[0].tokens != before[0].tokens
    assert after[1:] == before[1:]


def test_whole_authors_are_fetched(imported: Imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLSIM_CACHE", str(tmp_path / "cache"))
    assert folder_bytes(fetched(f"file://{imported.corpus.path}")) == folder_bytes(imported.corpus.path)
    half = tmp_path / "half"
    shutil.copytree(imported.corpus.path, half)
    manifest = json.loads((half / "manifest.json").read_text())
    del manifest["files"]["test-whole/users.i64"]
    (half / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"its manifest has no entry for test-whole/users\.i64"):
        Corpus.open(half)


def test_utility_needs_no_balanced_test_user(imported: Imported, tmp_path: Path) -> None:
    """Utility is measured although all test authors have too few words for a balanced user."""
    short = [author for author in imported.authors_of("test") if len(imported.texts[author]) == 1]
    train = imported.authors_of("train")
    posts = [(author, " ".join(" ".join(words) for words in imported.texts[author])) for author in (*short[:2], *train)]
    corpus = import_corpus([write_jsonl(tmp_path / "a.jsonl", posts)], tmp_path / "corpus", SETTINGS, workers=1)
    assert (len(corpus.split("test")), len(corpus.test_users)) == (0, 2)
    assert measured(evaluated(tmp_path / "a", corpus)[0])["whole_test_users"] == 2
