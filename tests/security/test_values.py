"""Tests that data files with any values are read, skipped or refused in one line, and that their texts stay text."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import Experiment
from reported import roster, write_run
from selectolax.lexbor import LexborHTMLParser

from flsim.base.errors import InputError
from flsim.base.files import file_digest
from flsim.base.parquet import MOST_ROWS, read_parquet
from flsim.canaries.population import PlantedCorpus, plant_corpus
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus, labelled_steps
from flsim.data.inspect import describe, inspect
from flsim.data.manifest import SPLITS
from flsim.report import provenance
from flsim.report.gather import gather
from flsim.report.page import render
from flsim.results.frames import frames
from flsim.results.rows import ROWS
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run
from flsim.runs.sweeps.folder import SweepFolder, state_of
from flsim.show.table import Column, latex, markdown

DEEP, INFINITE = "@deep@", "@infinite@"
ABSURD: list[Any] = [None, -1, INFINITE, "\ud800", [1], {"a": 1}]
RAW = {DEEP: "[" * 100_000 + "]" * 100_000, INFINITE: "Infinity"}
COLUMNS: list[pa.Array] = [
    pa.array(["x"]),
    pa.array([None]),
    pa.array([float("inf")]),
    pa.array([[-1]]),
    pa.array([[None]], pa.list_(pa.int64())),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield all places in a JSON value; in a list or an object of similar objects, only places in the first item."""
    yield place
    if isinstance(value, list):
        value = dict(enumerate(value[:1]))
    if isinstance(value, dict):
        like = {tuple(inner) if isinstance(inner, dict) else "" for inner in value.values()}
        for key in list(value)[: 1 if len(like) == 1 and like != {""} else None]:
            yield from places(value[key], (*place, key))


def absurd(value: Any) -> Iterator[str]:
    """Yield JSON texts of the value with an absurd value in one place, or without this place."""
    for place in places(value):
        for each in [*ABSURD, "gone", *([] if place else [DEEP])]:
            changed = json.loads(json.dumps({"": value}))
            at = changed
            for key in ("", *place)[:-1]:
                at = at[key]
            last = ("", *place)[-1]
            if each == "gone" and place:
                del at[last]
            else:
                at[last] = each
            text = json.dumps(changed[""])
            for name, raw in RAW.items():
                text = text.replace(json.dumps(name), raw)
            yield text


def survives(work: Callable[[], object]) -> bool:
    """Return True if `work` succeeds, and False if it raises an InputError; check that the error is one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # sums of absurd numbers
            work()
    except InputError as caught:
        said = str(caught)
    else:
        return True
    assert len(said.splitlines()) == 1, said
    assert len(said) < 800, said
    return False


def survive(file: Path, texts: Iterator[str], work: Callable[[], object]) -> None:
    """Check `work` with each text as content of the file. Some texts must be read, and some refused."""
    whole, found = file.read_bytes(), set()
    for text in texts:
        file.write_text(text, encoding="utf-8")
        found.add(survives(work))
    file.write_bytes(whole)
    assert found == {True, False}
    assert survives(work)


def render_parts(path: Path, *_: object) -> None:
    """Compute the content of a report and of data frames for a run or a sweep, without figures."""
    of = gather([path])
    provenance.provenance(of)
    provenance.failures(of)
    frames(path)


def test_absurd_values_in_the_description_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=(10,))
    file = run / "run.json"
    survive(file, absurd(json.loads(file.read_text())), lambda: render_parts(run, state_of(run, 0.0)))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("rounds.jsonl", {"round": 30, "loss": 1.0, "seconds": 1.0, "workers": ["a"]}),
        (
            "evaluations.jsonl",
            {"checkpoint": "round-000020.safetensors", "outcome": "failed", "attempt": 1, "seconds": 1.0, "ended": 1.0},
        ),
    ],
)
def test_absurd_lines_of_logs_are_skipped(tmp_path: Path, name: str, line: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", rounds=(10,), status="running")
    for text in absurd(line):
        (run / name).write_text(f"{text}\n")
        assert survives(lambda: render_parts(run, state_of(run, 0.0)))


def test_absurd_values_in_the_description_of_a_sweep(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", rounds=(10,))  # run b has not started
    published = {"table": "9", "data": "IID", "rs": 65, "canaries": 90}
    one = {
        "name": "a",
        "grid": "g",
        "seed": 0,
        "digest": "d",
        "axes": {"data.partition": "iid"},
        "published": published,
    }
    session = {"began": "2026-01-02", "seconds": 5.3, "peak_memory": 2**31, "cores": 2, "at_once": 2, "trained": ["a"]}
    said: dict[str, Any] = dict.fromkeys(("name", "title", "question", "tier", "about", "command", "source"), "x")
    said |= {"versions": {"torch": "2"}, "synthetic": None, "runs": [one, one | {"name": "b", "published": None}]}
    said |= {"sessions": [session | {"failed": {"b": "why"}}]}
    (tmp_path / "sweep.json").write_text(json.dumps(said))

    def work() -> None:
        survives(SweepFolder(tmp_path)._known)
        render_parts(tmp_path)

    survive(tmp_path / "sweep.json", absurd(said), work)


def read_all(path: Path) -> None:
    corpus = Corpus.open(path)
    for name in SPLITS:
        split = corpus.split(name)
        assert len(split.names) == len(split)
    labelled_steps(corpus)
    PlantedCorpus.read(corpus)
    describe(inspect(corpus))


def sealed_anew(path: Path, name: str) -> None:
    """Update size and digest of the changed file in the manifest, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text())
    file = path / name
    manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_absurd_values_in_the_files_of_a_corpus(experiment: Experiment) -> None:
    hparams = CanaryHParams(p_u=(0.2,), p_e=(0.5, 1.0), count=2)
    path = plant_corpus(Corpus.open(experiment.folder / "corpus"), experiment.folder / "planted", hparams, 0).path
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sources"] = [{"name": "a", "bytes": 3, "sha256": "x", "format": "jsonl"}]
    (path / "manifest.json").write_text(json.dumps(manifest))
    survive(path / "manifest.json", absurd(manifest), lambda: read_all(path))
    for name in ("train/split.json", "train/names.json", "planted/planting.json"):
        value = json.loads((path / name).read_text())

        def work(name: str = name) -> None:
            sealed_anew(path, name)
            read_all(path)

        survive(path / name, absurd(value), work)


def columns(table: pa.Table) -> Iterator[pa.Table]:
    """Yield tables without each column, with two other columns in its place, with false metadata, empty and doubled."""
    for place, name in enumerate(table.column_names):
        yield table.drop_columns([name])
        for value in (COLUMNS[place % len(COLUMNS)], COLUMNS[(place + 2) % len(COLUMNS)]):
            yield table.set_column(place, name, pa.concat_arrays([value] * len(table)))
    for said in ("{", "[]", '{"index_columns": ["nope"], "columns": [], "column_indexes": []}'):
        yield table.replace_schema_metadata({"pandas": said})
    yield table.slice(0, 0)
    yield pa.concat_tables([table, table])


def survive_tables(file: Path, work: Callable[[], object]) -> None:
    """Check `work` with each of `columns` as content of the file: some are refused, and the file's own is not."""
    whole, found = file.read_bytes(), set()
    for table in columns(pq.read_table(file)):
        pq.write_table(table, file)
        found.add(survives(work))
    file.write_bytes(whole)
    assert False in found
    assert survives(work)


@pytest.mark.parametrize("name", ["rows/round-000010.parquet", "planted/roster.parquet"])
def test_absurd_columns_in_the_tables_of_a_run(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", rounds=(10,))
    survive_tables(run / name, lambda: (render(gather([run])), frames(run)))


def test_absurd_values_in_the_planted_files_of_a_run(experiment: Experiment) -> None:
    path = Run.create(load_config(experiment.config, ["data.partition=iid"]), experiment.folder / "run").path
    file = path / "planted" / "population.json"
    said = json.loads(file.read_text())
    survive(file, absurd(said), lambda: Run.open(path).users[0])
    file = path / "planted" / "roster.parquet"
    survive_tables(file, lambda: (Run.open(path).users[0], Run.open(path).canaries))


def test_a_table_of_too_many_equal_rows_is_refused(tmp_path: Path) -> None:
    """Hundreds of millions of equal rows need only kilobytes in a file, but gigabytes in memory."""
    path = tmp_path / "round-000010.parquet"
    with pq.ParquetWriter(path, ROWS) as writer:
        one = pa.table([["run"], [10], ["rs"], ["c00"], [1.0]], schema=ROWS)
        for _ in range(11):
            writer.write_table(one.take(pa.array([0] * (MOST_ROWS // 10), pa.int32())))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(InputError, match="more than a run can have"):
        read_parquet(path, ROWS)


# Texts from other people, such as names of runs, titles and words, stay text in all pages and tables.

HOSTILE = (
    """<script>alert(1)</script><img src=//x onerror=alert(1)>"onload="a' {{7*7}} """
    "| `$(x)` [a](b) \\input{/etc/passwd} =1+1"
)


def test_a_report_has_no_script_even_if_names_are_hostile(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    path = write_run(sweep / "runs" / "a", setting=f"IID, {HOSTILE}", reason=HOSTILE, name="a", status="completed")
    planted = roster(0)
    planted["words"] = planted["words"].map(lambda words: [HOSTILE, *words[1:]])
    planted.to_parquet(path / "planted" / "roster.parquet")
    one = {"name": "a", "grid": HOSTILE, "seed": 0, "axes": {HOSTILE: HOSTILE}, "published": None}
    said = dict.fromkeys(("name", "title", "question", "tier", "about", "command", "source"), HOSTILE)
    session = {"began": HOSTILE, "seconds": 1.0, "trained": ["a"], "failed": {HOSTILE: HOSTILE}}
    about = {**said, "versions": {HOSTILE: HOSTILE}, "sessions": [session], "runs": [one, one | {"name": "b"}]}
    (sweep / "sweep.json").write_text(json.dumps(about))
    line = {"checkpoint": "round-000040.safetensors", "outcome": "failed", "attempt": 1, "seconds": 1.0, "ended": 1.0}
    (path / "evaluations.jsonl").write_text(json.dumps(line | {"reason": HOSTILE}))
    page = render(gather([sweep]))
    tree = LexborHTMLParser(page)
    title = tree.css("h1")[0].text()
    assert HOSTILE.split()[0] in title  # the name is shown as text
    assert page.count("&lt;script&gt;") > 10
    assert "{{7*7}}" in title
    nodes = tree.css("*")
    assert {node.tag for node in nodes} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "form",
        "base",
    } == set()
    named = [name for node in nodes for name in node.attributes]
    assert [name for name in named if name.startswith("on")] == []
    assert {str(node.attributes["href"])[:1] for node in nodes if "href" in node.attributes} == {"#"}
    policy = tree.css('meta[http-equiv="Content-Security-Policy"]')[0].attributes["content"]
    assert "default-src 'none'" in str(policy)


def test_tables_have_no_markup_even_if_names_are_hostile() -> None:
    labels, units = [Column("Setting", [HOSTILE], is_number=False)], [[Column("RS", ["1"])]]
    row = markdown(labels, units, width=1_000).splitlines()[2]
    assert re.sub(r"\\.", "", row).count("|") == 3  # the borders of cells
    assert not re.search(r"(?<!\\)(<\w|`|\[)", row)
    text = latex(labels, units)
    assert "\\input" not in set(re.findall(r"\\[A-Za-z]+", text))
    assert "textbackslash{}input" in text
