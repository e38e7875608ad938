"""Tests of corpora in an object store, with a real S3 server in a separate process on the loopback interface."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import numpy as np
import pytest
from dumps import folder_bytes
from helpers import Experiment, MakeCorpus, Trained, assert_same
from pyarrow.fs import S3FileSystem

from flsim.base.errors import InputError
from flsim.canaries.population import plant_corpus
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.manifest import PLANTED, named
from flsim.data.records import Layout, Vocabulary
from flsim.data.stores import fetched, push
from flsim.runs.config import load
from flsim.runs.folder import Run

URI = "s3://bucket/corpora/small"


@dataclass(frozen=True)
class Store:
    process: subprocess.Popen[str]
    endpoint: str

    def files(self) -> S3FileSystem:
        host = self.endpoint.removeprefix("http://")
        return S3FileSystem(endpoint_override=host, scheme="http", allow_bucket_creation=True, region="us-east-1")

    def write(self, path: str, content: bytes) -> None:
        with self.files().open_output_stream(path) as out:
            out.write(content)


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[Store]:
    said = folder / "server"
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=log, stderr=log, text=True, env={**os.environ, **environment},
        )  # fmt: skip
    try:
        while not (found := re.search(r"Running on (http://[\d.:]+)", said.read_text())):
            assert process.poll() is None, said.read_text()
            time.sleep(0.02)
        yield Store(process, found[1])
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", autouse=True)
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serving(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(running: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Provide a store with an empty bucket and an empty cache."""
    running.files().create_dir("bucket")
    running.files().delete_dir_contents("bucket", missing_dir_ok=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
    monkeypatch.setenv("FLSIM_CACHE", str(tmp_path / "cache"))
    return running


@pytest.fixture
def small(make_corpus: MakeCorpus) -> Corpus:
    return make_corpus([[[1, 2], [3]] * 500, [[4]]], test=[[[5]]])


def cached(tmp_path: Path) -> list[str]:
    """Return the names of complete corpora in the cache."""
    return [path.name for path in (tmp_path / "cache" / "corpora").glob("[!.]*") if not path.suffix]


def fetching(uri: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "flsim", "data", "inspect", uri]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_fetched_corpus_equals_the_pushed_corpus(store: Store, small: Corpus, tmp_path: Path) -> None:
    push(small.path, URI)
    corpus = Corpus.open(URI, verify=True)
    assert (corpus.path, corpus.digest) == (tmp_path / "cache" / "corpora" / small.digest, small.digest)
    assert folder_bytes(corpus.path) == folder_bytes(small.path)
    before = corpus.path.stat().st_ino
    assert Corpus.open(f"{URI}/?region=eu-west-1").path.stat().st_ino == before  # another URI of the same corpus
    assert Corpus.open(small.path.as_uri()).path.stat().st_ino == before


@pytest.mark.slow
def test_a_run_is_the_same_and_refuses_another_corpus(
    store: Store, experiment: Experiment, trained_here: Trained, make_corpus: MakeCorpus, tmp_path: Path
) -> None:
    push(tmp_path / "corpus", URI)
    settings = f"data.corpus='{URI}'"
    assert load(experiment.config, [settings]).digest == load(experiment.config).digest
    assert_same(trained_here(), experiment.run("far", settings))
    assert load(experiment.folder / "far" / "config.toml").data.corpus == URI
    assert len(cached(tmp_path)) == 1

    with pytest.raises(InputError, match="this place has another corpus"):
        push(make_corpus([[[1]] * 9], test=[[[2]]], vocabulary_size=40, name="other").path, URI)
    store.files().delete_dir_contents("bucket")
    push(tmp_path / "other", URI)
    with pytest.raises(InputError, match=r"round-000002\.parquet: the file has rows measured on another corpus"):
        Run.reopen(load(experiment.config, [settings, "training.rounds=5"]), tmp_path / "far")
    run = Run.open(tmp_path / "far")
    with pytest.raises(InputError, match=f"trained on another corpus than {URI}"):
        run.load(tmp_path / "far" / "checkpoints" / "round-000004.safetensors")
    assert len(cached(tmp_path)) == 2


def test_a_fetch_that_was_killed_leaves_nothing_to_the_next(store: Store, tmp_path: Path) -> None:
    """The process is killed after the store was stopped while sending the largest file; the next fetch is complete."""
    layout = Layout(12, 20)
    vocabulary = Vocabulary(tuple(f"w{index}" for index in range(layout.words)), tuple(range(layout.words, 0, -1)))
    records = 400_000  # 16 MB
    (tmp_path / "large").mkdir()
    with CorpusWriter(tmp_path / "large", vocabulary, layout) as writer:
        lengths = np.full(records, 20)
        writer.splits["train"].extend(["a"], np.ones(20 * records, np.uint16), lengths, np.array([records]))
        writer.finish(dropped={}, sources=[], parameters={})
    large = Corpus.open(tmp_path / "large")
    push(large.path, URI)

    process, corpora = fetching(URI), tmp_path / "cache" / "corpora"
    while process.poll() is None and not list(corpora.glob(".*/train/tokens.u16")):
        time.sleep(0.001)
    store.process.send_signal(signal.SIGSTOP)
    process.kill()
    process.communicate()
    store.process.send_signal(signal.SIGCONT)
    assert cached(tmp_path) == []

    assert folder_bytes(Corpus.open(URI).path) == folder_bytes(large.path)
    assert not list(corpora.glob(".*"))


def test_only_one_of_several_processes_fetches(store: Store, small: Corpus, tmp_path: Path) -> None:
    push(small.path, URI)
    processes = [fetching(URI) for _ in range(2)]
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert sum("fetching" in errors for _, errors in said) == 1
    assert cached(tmp_path) == [small.digest]


def test_a_file_that_changed_or_is_missing_is_named(store: Store, small: Corpus, tmp_path: Path) -> None:
    """The error names such a file. An empty file is not requested, therefore its new content does not matter."""
    push(small.path, URI)
    written = (small.path / "train" / "tokens.u16").read_bytes()
    store.write("bucket/corpora/small/heldout/tokens.u16", b"new")
    store.write("bucket/corpora/small/train/tokens.u16", bytes([written[0] ^ 1]) + written[1:])
    with pytest.raises(InputError, match=r"train/tokens\.u16: this object differs from the manifest"):
        fetched(URI)
    store.files().delete_file("bucket/corpora/small/train/tokens.u16")
    with pytest.raises(InputError, match=r"train/tokens\.u16: no such object"):
        fetched(URI)
    assert cached(tmp_path) == []
    store.write("bucket/corpora/small/train/tokens.u16", written)
    assert folder_bytes(fetched(URI)) == folder_bytes(small.path)


def test_only_files_of_a_corpus_are_read(store: Store, small: Corpus, tmp_path: Path) -> None:
    push(small.path, URI)
    empty = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    for name in ("train/../../outside", "/outside", "train/more"):
        manifest = json.loads((small.path / "manifest.json").read_text())
        manifest["files"][name] = empty
        store.write("bucket/corpora/small/manifest.json", json.dumps(manifest).encode())
        with pytest.raises(InputError, match="which is not a file of a corpus"):
            fetched(URI)
    assert cached(tmp_path) == []


def test_all_files_of_a_corpus_with_canaries_are_fetched(store: Store, experiment: Experiment) -> None:
    config = load(experiment.config)
    planted = plant_corpus(
        Corpus.open(experiment.folder / "corpus"), experiment.folder / "planted", config.canaries, config.seed
    )
    assert set(planted.manifest["files"]) == {*named(planted.layout), *PLANTED}
    push(planted.path, URI)
    assert folder_bytes(fetched(URI)) == folder_bytes(planted.path)


def test_a_store_that_does_not_answer(
    store: Store, small: Corpus, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is one line; a copy that was fetched before can still be used, and stderr reports this use."""
    push(small.path, URI)
    folder = fetched(URI)
    capfd.readouterr()
    with socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        assert fetched(URI) == folder
        used = f"using the last fetched copy, with digest {small.digest[:12]}"
        assert re.fullmatch(rf"{URI}: the store does not answer \(.*\); {used}\n", capfd.readouterr().err)
        with pytest.raises(InputError, match=f"^{URI}-never-seen: the store does not answer"):
            fetched(f"{URI}-never-seen")


def test_a_store_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLSIM_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="0") as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        with pytest.raises(InputError, match=r"access refused .*set credentials"):
            fetched(URI)


def test_errors_of_stores_are_one_line(store: Store, small: Corpus) -> None:
    with pytest.raises(InputError, match="no such bucket; create the bucket first"):
        push(small.path, "s3://nobucket/corpus")
    for uri, says in (
        ("s3://bucket/nowhere", "no such object or bucket"),
        ("file:///nowhere/corpus", "no such object"),
        ("corpora/copy", "this is a folder, not the URI of a store; use a URI such as s3://BUCKET/PREFIX"),
        ("ftp://bucket/corpus", "cannot read from ftp://; name a folder, or s3, gs, file://"),
        ("s3://key:secret@bucket/corpus", "a URI must not contain credentials"),
        ("s3://bucket/corpus?secret_key=x", "there is no option secret_key"),
        ("s3://bucket/corpus?scheme=ftp", "Invalid S3 connection scheme 'ftp'"),
        ("file://corpus", "write it as .* file:///FOLDER"),
    ):
        with pytest.raises(InputError, match=says) as error:
            fetched(uri)
        assert "\n" not in str(error.value)
        assert "secret@" not in str(error.value)


@pytest.mark.parametrize(("options", "says"), [("size=4k", "no space for"), ("nr_inodes=9", "No space left on device")])
def test_a_full_disk_is_one_line(
    store: Store, small: Corpus, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, options: str, says: str
) -> None:
    """A lack of bytes is known before the fetch, and a lack of inodes only during it; both errors are one line."""
    push(small.path, URI)
    folder = disk(options)
    monkeypatch.setenv("FLSIM_CACHE", str(folder))
    with pytest.raises(InputError, match=rf"^{folder}/.*{says}.*FLSIM_CACHE"):
        fetched(URI)
    disk("size=1m,nr_inodes=99")
    assert folder_bytes(fetched(URI)) == folder_bytes(small.path)


def test_a_cache_that_was_tampered_with_is_named(store: Store, small: Corpus) -> None:
    push(small.path, URI)
    folder = fetched(URI)
    (folder / "train" / "tokens.u16").write_bytes(b"")
    with pytest.raises(InputError, match=f"tokens.u16: missing, or its size differs .*; remove {folder} to fetch"):
        Corpus.open(URI)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=f"{folder}: this folder differs from what was fetched from"):
        Corpus.open(URI)
