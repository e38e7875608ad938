"""Tests that no file or message executes code: calls in flsim's source, harmful files, and custom code that exits."""

import ast
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from custom_code import SETTINGS, exiting, import_held_out_users
from flwr.app import Array, ArrayRecord
from helpers import TINY, Experiment
from reported import write_run

from flsim.algorithms.checkpoint import load
from flsim.algorithms.summation import RoundRequest, ShardReply
from flsim.algorithms.wire import Address, decode_reply, decode_request, encode_reply, encode_requests
from flsim.base.errors import InputError
from flsim.base.parquet import read_parquet
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams, users_of
from flsim.data.importing.tasks import import_corpus
from flsim.report.page import write_report
from flsim.results.rows import ROWS, read_run
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run
from flsim.training.update import Counts, UpdateSum

ROOT = Path(__file__).parents[2]
FOLDERS = ("flsim", "clients", "server", "experiments", "deploy", ".ci")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
EXECUTING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "read_pickle", "load_dataset", "unpack_archive"}
WORDS = {"weights_only", "allow_pickle", "shell", "filter"}
PARAMS = {"weight": torch.zeros(2)}


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield calls: the name of the object, "" without object; the name of the function; and the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield "", node.func.id, node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.value.id if isinstance(node.func.value, ast.Name) else "...", node.func.attr, node


def wrong_in(path: Path, tree: ast.AST) -> list[str]:
    """Return the imports and calls of a file that could execute data that the file reads."""
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.split(".")[0] in EXECUTING]
    for of, name, call in calls(tree):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg in WORDS}
        found += [f"{of}.{name}"] * (name in CALLS and of in {"", "os", "builtins", "pd", "pandas", "shutil"})
        found += [f"{of}.{name}"] * (of == "torch" and name == "load" and given.get("weights_only") != "True")
        found += [f"{of}.{name}"] * (given.get("allow_pickle", "False") != "False")
        found += [f"{of}.{name}"] * (given.get("shell", "False") != "False")
        found += [f"{of}.{name}"] * (name == "extractall" and given.get("filter") != "'data'")
    if path == ROOT / "flsim" / "base" / "extensions.py":  # custom code that a setting names
        found = [name for name in found if name not in (".exec", ".compile")]
        assert [ast.unparse(call) for _, name, call in calls(tree) if name == "exec"] == [
            "exec(compile(source, str(path), 'exec'), module.__dict__)"
        ]
    if path == ROOT / "flsim" / "base" / "pool.py":  # reads only what it has just written
        found.remove("pickle")
        loads = [ast.unparse(call) for of, name, call in calls(tree) if of == "pickle" and "load" in name]
        assert loads == ["pickle.loads(pickle.dumps(error))"]
    return found


def test_no_code_executes_what_it_reads() -> None:
    wrong = {path: wrong_in(path, ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert not {path: calls for path, calls in wrong.items() if calls}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "archive.extractall(folder)",
    ],
)
def test_the_rule_finds_code_that_executes_data(code: str) -> None:
    assert wrong_in(ROOT / "flsim" / "new.py", ast.parse(code))


class Bomb:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def bombs(path: Path) -> dict[str, bytes]:
    """Return files of each form that can contain pickled objects; if unpickled, they create a folder at `path`."""
    saved, array, archive = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"weight": Bomb(path)}, saved)
    np.save(array, np.array([Bomb(path)], object), allow_pickle=True)
    with zipfile.ZipFile(archive, "w") as zipped:
        for name in ("train.tokens", "train.names"):
            zipped.writestr(f"{name}.npy", array.getvalue())
    forms = {"pickle": pickle.dumps(Bomb(path)), "torch": saved.getvalue()}
    return forms | {"npy": array.getvalue(), "npz": archive.getvalue()}


@pytest.fixture
def crater(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder that a bomb would create, and check after the test that it does not exist."""
    yield tmp_path / "crater"
    assert not (tmp_path / "crater").exists()


@pytest.mark.parametrize("form", ["pickle", "torch", "npy", "npz"])
def test_the_bombs_work_if_they_are_unpickled(tmp_path: Path, form: str) -> None:
    bomb = io.BytesIO(bombs(tmp_path / "crater")[form])
    if form == "pickle":
        pickle.load(bomb)
    elif form == "torch":
        torch.load(bomb, weights_only=False)
    else:
        found = np.load(bomb, allow_pickle=True)
        assert found is not None if form == "npy" else found["train.names"] is not None
    assert (tmp_path / "crater").exists()


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(InputError) as caught:
        work()
    assert len(" ".join(str(caught.value).split())) < 800


def refused_with_bombs(paths: Iterable[Path], crater: Path, work: Callable[[], object]) -> None:
    """Check that `work` is refused if a bomb replaces any of the files, and succeeds with the original files."""
    for path in paths:
        whole = path.read_bytes()
        for bomb in bombs(crater).values():
            path.write_bytes(bomb)
            refused(work)
        path.write_bytes(whole)
    work()


@pytest.fixture
def run(experiment: Experiment) -> Run:
    """Return a run before its first round."""
    return Run.create(load_config(experiment.config, ["data.partition=iid"]), experiment.folder / "run")


def test_no_file_of_a_run_is_unpickled(run: Run, crater: Path) -> None:
    """A bomb in place of a checkpoint, a file of the planted corpus, the settings or the status is refused."""
    path = run.save(run.training().first_state())
    for work in (load, run.load):
        refused_with_bombs([path], crater, lambda work=work: work(path))  # type: ignore[misc]
    planted = ("roster.parquet", "overlay.i64", "overlay.u16", "twin.u32", "twin_users.i64", "population.json")
    refused_with_bombs((run.path / "planted" / name for name in planted), crater, lambda: Run.open(run.path).users)
    about = (run.path / "run.json", run.path / "config.toml")
    refused_with_bombs(about, crater, lambda: (read_run(run.path), Run.open(run.path)))


def test_no_file_of_a_corpus_is_unpickled(run: Run, crater: Path) -> None:
    files = [run.corpus.path / name for name in ("manifest.json", *run.corpus.manifest["files"])]
    refused_with_bombs(files, crater, lambda: Corpus.open(run.corpus.path, verify=True))


def test_rows_and_roster_are_not_unpickled(tmp_path: Path, crater: Path) -> None:
    run = write_run(tmp_path / "run")
    files = (run / "rows" / "round-000010.parquet", run / "planted" / "roster.parquet")
    refused_with_bombs(files, crater, lambda: write_report([run], tmp_path / "report.html"))


def test_types_and_metadata_of_parquet_are_not_unpickled(tmp_path: Path, crater: Path) -> None:
    """Arrow once unpickled extension types named in a file (CVE-2023-47248). Metadata of pandas is not used."""
    rows = read_parquet(write_run(tmp_path / "run") / "rows" / "round-000010.parquet", ROWS)
    table = pa.Table.from_pandas(rows, preserve_index=False)
    bomb = pickle.dumps(Bomb(crater), protocol=0)
    extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": bomb}
    fields = [field.with_metadata(extension) for field in table.schema]
    schema = pa.schema(fields, {"pandas": bomb, "PANDAS_ATTRS": bomb})
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.Table.from_arrays(table.columns, schema=schema), path)
    assert bomb in path.read_bytes()
    assert read_parquet(path, ROWS).equals(rows)


@pytest.mark.parametrize("form", ["pickle", "npz"])
@pytest.mark.parametrize("name", ["a.h5", "a.sqlite", "a.parquet", "a.jsonl", "a.Posts.xml", "a.bz2"])
def test_sources_of_an_import_are_not_unpickled(tmp_path: Path, crater: Path, form: str, name: str) -> None:
    (tmp_path / name).write_bytes(bombs(crater)[form])
    refused(lambda: import_corpus([tmp_path / name], tmp_path / "corpus", ImportHParams(), workers=1))
    assert not (tmp_path / "corpus").exists()


def test_objects_in_hdf5_are_not_unpickled(tmp_path: Path, crater: Path) -> None:
    """Pickled bytes in place of sentences are treated as text, and the import is refused."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("examples/user")
        for name in ("tokens", "creation_date", "title", "score", "tags", "type"):
            group[name] = np.array([pickle.dumps(Bomb(crater), protocol=0)] * 3, h5py.special_dtype(vlen=bytes))
    refused(lambda: import_corpus([tmp_path / "a.h5"], tmp_path / "corpus", ImportHParams(), workers=1))


def test_pieces_of_an_import_are_not_unpickled(tmp_path: Path, crater: Path) -> None:
    path = tmp_path / "bucket"
    for form in ("npz", "npy", "pickle"):
        path.write_bytes(bombs(crater)[form])
        with pytest.raises((ValueError, KeyError, TypeError)):
            users_of(path)


@pytest.mark.parametrize("form", ["pickle", "npy"])
def test_messages_are_not_unpickled(crater: Path, form: str) -> None:
    bomb = Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=bombs(crater)[form])
    request = encode_requests([RoundRequest(0, 0, np.zeros(1, np.int64), PARAMS)], Address("run", "digest"))[0]
    assert decode_request(request)[0].round == 0
    request["params"] = ArrayRecord({"weight": bomb})
    reply = encode_reply(ShardReply(0, 0, UpdateSum({"weight": torch.zeros(2)}, Counts(1.0, 1, 0.5, 2)), "node"))
    assert decode_reply(reply).round == 0
    reply["delta"] = ArrayRecord({"weight": bomb})
    for work in (lambda: decode_request(request), lambda: decode_reply(reply)):
        with pytest.raises((ValueError, TypeError, AttributeError, EOFError)):
            work()


DP = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=1")
EVALUATE = ("--canaries", "c.csv", "--vocabulary", "40")
READ = ("data", "import", "text.txt", "--format", "format.py:lines", "--out", "made")
OTHERS = {
    "format": READ,
    "factory": ("evaluate", "--model", "factory.py:model", *EVALUATE),
    "imported factory": ("evaluate", "--model", "factory:model", *EVALUATE),  # a module that Python imports
}

ONCE = ("--in-process", "--set", "system.retries=0")  # without the pauses before retries of a shard
EXITS_HERE = ("--out", "run", *ONCE, "--set", "local.schedule=schedule.py:constant")


def assert_failed(experiment: Experiment, arguments: tuple[str, ...], why: str = "SystemExit: 0") -> None:
    done = experiment.call(*arguments, check=False)
    assert done.returncode in (1, 2), done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"\w+(\.\w+)?\.py:\d+: {why}|failed with {why} \(.*\w+\.py:\d+\)", last), done.stderr
    assert "Traceback" not in done.stderr


def write(experiment: Experiment, kind: str, source: str) -> None:
    """Write code of a kind. flsim executes a file once for each content, so the content differs between tests."""
    (experiment.folder / f"{kind}.py").write_text(f"{source}# {experiment.folder}\n")


@pytest.mark.parametrize("kind", SETTINGS)
def test_code_of_a_run_that_exits_fails_the_run(experiment: Experiment, kind: str) -> None:
    write(experiment, kind, exiting(kind))
    experiment.config.write_text(TINY)
    settings = (SETTINGS[kind], *(DP if kind == "noise" else ()))
    options = [part for setting in settings for part in ("--set", setting)]
    assert_failed(experiment, ("run", "tiny.toml", "--out", "run", *ONCE, *options))


@pytest.mark.parametrize("kind", OTHERS)
def test_code_of_other_commands_that_exits_fails_the_command(experiment: Experiment, kind: str) -> None:
    kind_of_code = kind.removeprefix("imported ")
    write(experiment, kind_of_code, exiting(kind_of_code))
    (experiment.folder / "text.txt").write_text("one\n")
    (experiment.folder / "c.csv").write_text("id,tokens\nc1,5 6 7 8 9\n")
    assert_failed(experiment, OTHERS[kind])
    assert not (experiment.folder / "made").exists()


MADE_BY_EXEC = "exec('def {name}(*_): raise SystemExit(0)')"


@pytest.mark.parametrize(
    ("kind", "source", "arguments"),
    [
        ("format", "from sys import exit as lines", READ),
        ("format", MADE_BY_EXEC.format(name="lines"), READ),
        ("schedule", MADE_BY_EXEC.format(name="constant"), ("run", "tiny.toml", *EXITS_HERE)),
    ],
)
def test_custom_functions_without_a_frame_in_the_file_that_exit_fail_the_command(
    experiment: Experiment, kind: str, source: str, arguments: tuple[str, ...]
) -> None:
    """A function that the file imports, or that `exec` creates, has no frame in the file."""
    write(experiment, kind, f"{source}\n")
    (experiment.folder / "text.txt").write_text("one\n")
    experiment.config.write_text(TINY)
    done = experiment.call(*arguments, check=False)
    assert done.returncode in (1, 2), done.stderr
    assert "SystemExit" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_attack_that_exits_fails_the_command(experiment: Experiment) -> None:
    import_held_out_users(experiment)
    experiment.config.write_text(TINY)
    write(experiment, "attack", exiting("attack"))
    experiment.call("run", "tiny.toml", "--out", "run", "--in-process")
    assert_failed(experiment, ("membership", "run", "--attack", "attack.py:worst_word"))


def test_a_custom_base_exception_is_one_line(experiment: Experiment) -> None:
    stop = "class Stop(BaseException): ...\n\n\n"
    write(experiment, "schedule", stop + exiting("schedule", "raise Stop('enough')"))
    assert_failed(experiment, ("run", "tiny.toml", *EXITS_HERE), "Stop: enough")
