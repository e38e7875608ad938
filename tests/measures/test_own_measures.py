"""Tests of custom measures cover configuration, everything that shows results, and refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers import Experiment, final_state
from shown import from_csv, over_seeds, to_markdown

from flsim.base.errors import InputError
from flsim.results import tables
from flsim.results.frames import frames
from flsim.results.rows import read_rows, read_run
from flsim.runs.config import load
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.runs.trackers import tracking
from flsim.show.plots import draw_rounds
from flsim.show.table import to_csv

SENTENCE = "Log-perplexity of a canary, per word that is not known."
PARTITIONS = ("iid", "non-iid")


def values(folder: Path, metric: str, round_: int = 4) -> "pd.Series[float]":
    rows = read_run(folder).rows
    at = rows[(rows["metric"] == metric) & (rows["round"] == round_)]
    return at.set_index("canary")["value"]


def test_custom_measures_are_in_everything_that_shows_results(
    measured: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [measured.folder / partition for partition in PARTITIONS]
    monkeypatch.setattr("flsim.base.extensions._execute", lambda *_: pytest.fail("code of a run was executed"))
    monkeypatch.setattr("flsim.base.extensions._modules", {})
    (measured.folder / "surprise.py").unlink()
    monkeypatch.chdir(measured.folder)
    nats = values(folders[0], "log_perplexity") / 4  # canaries have five words, of which one is the prefix
    surprise = values(folders[0], "surprise")
    np.testing.assert_allclose(surprise, nats, rtol=1e-6)
    flag = values(folders[0], "unsurprising")
    assert (flag == (surprise < 3)).all()

    (row, _) = tables.memorization_table([read_run(folder) for folder in folders]).to_dict("records")
    assert (row["mean_surprise"], row["unsurprising"]) == (pytest.approx(surprise.mean()), int(flag.sum()))
    assert row["surprise_low"] < row["mean_surprise"] < row["surprise_high"]
    assert row["size"] == values(folders[0], "size").iloc[0]
    text = measured.call("table", *PARTITIONS).stdout
    assert f"Surpr.: mean over canaries, nats per word, higher is better. {SENTENCE}" in " ".join(text.split())
    assert all(heading in text for heading in ("Surpr.", f"US /{len(flag)}", "size"))
    assert "\nUS: Whether the surprise is below 3 nats per word.\n" in text

    rows = json.loads(measured.call("compare", *PARTITIONS, "--json").stdout)["rows"]
    first = {row["quantity"]: row for row in reversed(rows) if row["row"] == "all" and row["test"] in {"t", "McNemar"}}
    assert first["surprise"]["difference"] == pytest.approx((surprise - values(folders[1], "surprise")).mean())
    assert first["unsurprising"]["value_a"] == flag.sum()

    traced = json.loads(measured.call("trace", "iid", "--json").stdout)
    last = {row["canary"]: row["surprise"] for row in traced if row["round"] == 4}
    assert last == pytest.approx(surprise.to_dict())

    titles = {panel.get_title() for panel in draw_rounds([read_run(folder) for folder in folders]).axes}
    assert {"unsurprising: canaries memorized", "Mean surprise", "size"} <= titles

    measured.call("report", *PARTITIONS, "--out", "report.html")
    page = (measured.folder / "report.html").read_text(encoding="utf-8")
    assert page.count(SENTENCE) >= 2  # below the table of runs, and below that of IID against non-IID

    runs, canaries = frames(*map(str, folders))
    assert runs["mean_surprise"].notna().all()
    at_end = canaries[(canaries["run"] == "iid") & (canaries["round"] == 4)].set_index("canary")
    assert at_end["surprise"].tolist() == surprise.reindex(at_end.index).tolist()
    assert (str(at_end["unsurprising"].dtype), str(at_end["surprise"].dtype)) == ("boolean", "Float64")


def test_an_evaluation_and_trackers_have_custom_measures(measured: Experiment) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = measured.folder / "iid"
    listed = " ".join(measured.call("evaluate", folder / "checkpoints" / "round-000004.safetensors").stdout.split())
    assert f"Surpr.: nats per word, higher is better. {SENTENCE}" in listed
    assert f"| {values(folder, 'surprise').iloc[0]:.2f} |" in listed
    with tracking(folder, ("tensorboard",), {}):
        pass
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    told = {tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    for round_ in (2, 4):
        assert told["eval/mean surprise"][round_] == pytest.approx(values(folder, "surprise", round_).mean(), rel=1e-6)
        assert told["eval/unsurprising"][round_] == values(folder, "unsurprising", round_).sum()
        assert told["eval/size"][round_] == values(folder, "size", round_).iloc[0]


def test_tables_with_custom_measures_are_read_back(measured: Experiment) -> None:
    runs = [read_run(measured.folder / partition) for partition in PARTITIONS]
    own = list(runs[0].own.values())
    assert [quantity.name for quantity in own] == ["surprise", "unsurprising", "size"]
    for table in (tables.memorization_table(runs), over_seeds(runs)):
        again = from_csv(to_csv(table), own)
        pd.testing.assert_frame_equal(again, table)
        path = measured.folder / "table.parquet"
        table.to_parquet(path)
        assert to_markdown(pd.read_parquet(path)) == to_markdown(table) == to_markdown(again)


def test_the_content_of_the_file_of_a_measure_is_part_of_the_digest(measured: Experiment) -> None:
    also = f'evaluation.also=["{measured.folder}/surprise.py:surprise"]'
    first = load(measured.config, [also]).digest
    with (measured.folder / "surprise.py").open("a") as file:
        file.write("# changed\n")
    assert load(measured.config, [also]).digest not in {first, load(measured.config).digest}


def test_files_of_rows_without_custom_measures_have_no_descriptions(measured: Experiment) -> None:
    """The Parquet file has only the metadata of pandas, and the rows of built-in measures are unchanged."""
    folder = measured.folder / "iid"
    path = folder / "rows" / "round-000004.parquet"
    rows, own = read_rows(path)
    assert set(own) == {"surprise", "unsurprising", "size"}
    path.unlink()  # an evaluation keeps rows that it does not measure again
    evaluate_checkpoint(folder, folder / "checkpoints" / "round-000004.safetensors", also=())
    plain, nothing = read_rows(path)
    assert not nothing
    assert set(pq.read_schema(path).metadata) == {b"pandas"}
    pd.testing.assert_frame_equal(rows[~rows["metric"].isin(own)].reset_index(drop=True), plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "flag"}, "the file has values that are invalid for their metrics"),
        ({"name": "perplexity", "column": "perplexity"}, "the description of a built-in measure is wrong"),
        ({"name": "../up"}, "its descriptions of measures are damaged"),
        ({"is_primary": True}, "its descriptions of measures are damaged"),
        ({"heading": ["a"]}, "its descriptions of measures are damaged"),
    ],
)
def test_invalid_descriptions_of_measures_in_files_are_refused(
    measured: Experiment, change: dict[str, object], message: str
) -> None:
    path = measured.folder / "iid" / "rows" / "round-000004.parquet"
    table = pq.read_table(path)
    listed = json.loads(table.schema.metadata[b"flsim.quantities"])
    metadata = table.schema.metadata | {b"flsim.quantities": json.dumps([listed[0] | change]).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(InputError, match=f"round-000004.parquet: {message}"):
        read_run(measured.folder / "iid")


def test_two_measures_with_the_same_name_are_not_compared(measured: Experiment) -> None:
    folder = measured.folder / "iid"
    file = measured.folder / "surprise.py"
    file.write_text(file.read_text().replace("nats per word", "bits per word"))
    other, checkpoint = measured.folder / "non-iid", "checkpoints/round-000004.safetensors"
    evaluate_checkpoint(folder, folder / checkpoint, also=(f"{file}:surprise",))
    with pytest.raises(InputError, match="the description of surprise differs from that of an earlier round"):
        read_run(folder)
    (folder / "rows" / "round-000002.parquet").unlink()
    with pytest.raises(InputError, match=r"runs non-iid and iid: surprise differs between the runs \(kind, unit"):
        tables.memorization_table([read_run(other), read_run(folder)])


WRONG_BEFORE = {
    "import nothing_such\n": r"bad.py:5: ModuleNotFoundError",
    "measure = 3\n": "found 3; use a flsim.measures.Measure",
    "measure = one(Quantity(name='rs', description='D.'))": "flsim has rs already",
    "measure = one(Quantity(name='round', description='D.', subject='model'))": "a table of results has round already",
    "measure = one(Quantity(name='a', description='D'), Quantity(name='b', description='D', subject='model'))": "split",
    "measure = one(Quantity(name='own', description='D.'))": "bad.py:measure: own of .* is nan, which is not finite",
}
START = """from flsim.measures import Measure, Quantity
def one(*quantities):
    return Measure('own', lambda probe: float('nan'), quantities)

"""


@pytest.mark.parametrize("source", WRONG_BEFORE)
def test_invalid_and_always_failing_measures_are_refused_before_training(experiment: Experiment, source: str) -> None:
    (experiment.folder / "bad.py").write_text(START + source)
    also = 'evaluation.also=["bad.py:measure"]'
    done = experiment.call("run", "tiny.toml", "--out", "run", "--set", also, check=False)
    assert done.returncode == 2
    assert re.search(WRONG_BEFORE[source], done.stderr.splitlines()[-1]), done.stderr
    assert not (experiment.folder / "run").exists()


WRONG_MEANWHILE = {
    "1 / 0": r"bad.py:7: ZeroDivisionError: division by zero",
    "float('nan')": "own of canary .* is nan, which is not finite",
    "{'other': 1.0}": "computed 'other' of canary .*, which is not one of its quantities",
    "{}": "computed no own of canary .*; compute it, or set is_partial for this quantity",
    "probe.prefix": "own of canary .* is tensor.*, which is not a number",
    "(next(probe.model.parameters()).data.zero_(), 1.0)[1]": "bad.py:measure: the code changes the model's .*a copy",
    "setattr(probe.model, 'extra', torch.nn.Parameter(torch.zeros(1))) or 1.0": "changes the model's extra",
    "(probe.references.clamp_(max=1), 1.0)[1]": "the code changes references",
    "(probe.continuation.data.zero_(), 1.0)[1]": "the code changes continuation",
}


@pytest.mark.parametrize("result", WRONG_MEANWHILE)
def test_a_measure_that_fails_or_changes_shared_objects_stores_no_rows(experiment: Experiment, result: str) -> None:
    (experiment.folder / "bad.py").write_text(
        "import torch\nfrom flsim.measures import Measure, Quantity\n\n\n"
        f"def compute(probe):\n    # computes\n    return {result}\n\n\n"
        "measure = Measure('own', compute, (Quantity(name='own', description='D.'),))\n"
    )
    run = Run.create(load(experiment.config), experiment.folder / "run")
    checkpoint = run.save(replace(run.latest_state(), round=2))
    done = experiment.call("evaluate", checkpoint, "--also", "bad.py:measure", check=False)
    assert done.returncode == 1
    assert re.search(WRONG_MEANWHILE[result], done.stderr.splitlines()[-1]), done.stderr
    assert not list((run.path / "rows").iterdir())


def test_a_partial_quantity_is_listed_and_not_averaged(experiment: Experiment) -> None:
    (experiment.folder / "some.py").write_text(
        "from flsim.measures import Measure, Quantity\n"
        "compute = lambda probe: {'even': 1.0} if int(probe.canary.id[1:]) % 2 == 0 else {}\n"
        "measure = Measure('even', compute, (Quantity(name='even', description='D.', is_partial=True),))\n"
    )
    run = Run.create(load(experiment.config), experiment.folder / "run")
    path = run.save(replace(run.latest_state(), round=2))
    done = experiment.call("evaluate", path, "--also", "some.py:measure")
    heading, _, *rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    place = [cell.strip() for cell in heading].index("even")
    assert [row[place].strip() for row in rows] == ["" if index % 2 else "1" for index in range(len(run.canaries))]
    assert "mean_even" not in tables.memorization_table([read_run(run.path)])


# Runs on Ray are evaluated with custom measures: one works, and one fails in the evaluator.

SOURCE = """from flsim.measures import Measure, Quantity


def compute(probe):
    return {result}

measure = Measure("own", compute, (Quantity(name="own", unit="words", description="Words of a canary."),))
"""


@pytest.mark.slow
def test_evaluators_on_ray_use_the_runs_copy_of_a_custom_measure(experiment: Experiment) -> None:
    (experiment.folder / "own.py").write_text(SOURCE.format(result="len(probe.canary.tokens)"))
    run = experiment.run("run", 'evaluation.also=["own.py:measure"]')
    (copy,) = (run / "code").iterdir()
    assert copy.read_text() == (experiment.folder / "own.py").read_text()
    results = read_run(run)
    assert results.own["own"].unit == "words"
    for round_ in results.evaluated:
        values = results.of_canaries("own", round_)
        assert values is not None
        assert set(values) == {5.0}


@pytest.mark.slow
def test_a_measure_that_fails_is_named_with_its_line_and_training_continues(experiment: Experiment) -> None:
    """The measure fails with the 200 references of the run, and not with the smaller number of the trial before."""
    (experiment.folder / "own.py").write_text(SOURCE.format(result="1 / (len(probe.references) - 200)"))
    also = 'evaluation.also=["own.py:measure"]'
    done = experiment.flsim("run", experiment.config, "--out", "run", "--set", also, check=False)
    assert done.returncode == 1
    assert re.search(r"own\.[0-9a-f]{16}\.py:5: ZeroDivisionError", done.stderr.splitlines()[-1]), done.stderr
    run = experiment.folder / "run"
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert final_state(run).round == 4
    assert not list((run / "rows").iterdir())
