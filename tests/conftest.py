"""Fixtures provide small corpora, runs that are trained once for several tests, and commands in this process."""

import gc
import os
import shutil
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from helpers import CENTRAL, TINY, Experiment, Flsim, MakeCorpus, Trained, train_here
from hypothesis import settings

from benchmarks import __main__ as benchmarks
from flsim import cli
from flsim.base.files import new_folder
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.records import Layout, Records, Vocabulary

gc.disable()  # until pytest has collected all tests: a search of a million imported objects for garbage takes 0.5 s
torch.set_num_threads(1)
settings.register_profile("no deadline", deadline=None)  # an example may take long on a busy machine
settings.load_profile("no deadline")
os.environ["PYTHONFAULTHANDLER"] = "1"  # a process that crashes in C++ code prints its traceback
os.fsync = lambda fd: None  # saves milliseconds for each file; tests/power records what real commands sync
LONG = (  # files whose tests take longest; most of them train on Ray
    *("test_central_run", "faults/", "test_flower", "test_central_cluster", "pool/", "test_own_optimizers"),
    *("data/test_stores", "cluster/", "algorithms/test_algorithms", "sweeps/test_sweeping"),
    *("runs/test_tracking", "benchmarks/test_training", "test_own_model"),
    *("frozen/", "power/", "data/importing/test_restart", "report/test_report_browser", "security/test_values"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first; otherwise, a worker would run one at the end, while the other workers have no tests."""
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
    gc.freeze()  # later garbage collections skip the imported objects, which remain in use
    gc.enable()


@pytest.fixture
def make_corpus(tmp_path: Path) -> MakeCorpus:
    """Return a function that writes a corpus; a split is a list of users, a user of records, and a record of ids."""

    def make(
        train: Sequence[list[list[int]]],
        test: Sequence[list[list[int]]] = (),
        heldout: Sequence[list[list[int]]] = (),
        vocabulary_size: int = 12,
        record_words: int = 20,
        name: str = "corpus",
    ) -> Corpus:
        layout = Layout(vocabulary_size, record_words)
        words = tuple(f"w{index}" for index in range(layout.words))
        vocabulary = Vocabulary(words, tuple(range(layout.words, 0, -1)))
        path = tmp_path / name
        with new_folder(path) as folder, CorpusWriter(folder, vocabulary, layout) as writer:
            for split, users in (("train", train), ("heldout", heldout), ("test", test)):
                for index, records in enumerate(users):
                    writer.splits[split].add(f"{split}{index}", Records.from_lists(records))
            writer.finish(dropped={}, sources=[], parameters={})
        return Corpus.open(path, verify=True)

    return make


@pytest.fixture
def random_users() -> Callable[..., list[list[list[int]]]]:
    """Return a function that draws users with random records of 1 to 8 words."""

    def make(users: int, records: int, words: int, seed: int = 0) -> list[list[list[int]]]:
        rng = np.random.default_rng(seed)
        return [
            [rng.integers(1, words, rng.integers(1, 9), endpoint=True).tolist() for _ in range(records)]
            for _ in range(users)
        ]

    return make


@pytest.fixture
def experiment(
    make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]], tmp_path: Path
) -> Experiment:
    """Return an experiment with `TINY`, on 24 users of 8 records and 4 test users with a vocabulary size of 40."""
    make_corpus(random_users(24, 8, 36), test=random_users(4, 8, 36, seed=1), vocabulary_size=40)
    (tmp_path / "tiny.toml").write_text(TINY)
    return Experiment(tmp_path)


@pytest.fixture
def central_experiment(experiment: Experiment) -> Experiment:
    """Return a central experiment on 192 records: an epoch has 22 steps, of which the last reads 3 records."""
    experiment.config.write_text(CENTRAL)
    return experiment


@pytest.fixture
def trained(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function that trains a complete run with overrides once for all tests, which must not change it."""
    return trained_once(experiment, tmp_path_factory, "trained", lambda own, overrides: own.run("run", *overrides))


@pytest.fixture
def trained_here(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the same without Ray, in this process, in seconds: for tests of results, not of the command `run`."""
    return trained_once(experiment, tmp_path_factory, "here", train_here)


@pytest.fixture
def copy_of_trained(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function that copies a run, trained once by `flsim run --in-process`, into the experiment's folder."""
    trained = trained_once(
        experiment,
        tmp_path_factory,
        "command",
        lambda own, overrides: own.run("run", *overrides, options=["--in-process"]),
    )
    return lambda *overrides: Path(shutil.copytree(trained(*overrides), experiment.folder / "run"))


def trained_once(
    experiment: Experiment,
    factory: pytest.TempPathFactory,
    name: str,
    train: Callable[[Experiment, tuple[str, ...]], object],
) -> Trained:
    """Return a function that returns the run with some overrides; only the first call trains the run."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def trained(*overrides: str) -> Path:
        settings = "\n".join([experiment.config.read_text(), *overrides])
        folder = shared / f"{name}-{sha256(settings.encode()).hexdigest()[:16]}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                shutil.copytree(experiment.folder / "corpus", folder / "corpus")
                shutil.copy(experiment.config, folder)
                train(Experiment(folder), overrides)
        return folder / "run"

    return trained


@pytest.fixture
def flsim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Flsim:
    """Return a function that runs `flsim` in this process and returns exit code, standard output and error."""
    return _runs(cli.main, capsys, monkeypatch)


@pytest.fixture
def benchmark_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Flsim:
    """Return a function like `flsim` that runs commands of `python -m benchmarks`."""
    return _runs(benchmarks.main, capsys, monkeypatch)


def _runs(main: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Flsim:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        output = capsys.readouterr()
        return int(stop.value.code or 0), output.out, output.err

    return run
