"""Tests of models trained elsewhere cover canaries, folders of measurements, attacks, and audits of measurements."""

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from dumps import folder_bytes
from helpers import Flsim, Trained, refusal, rows
from safetensors.torch import save_file

from flsim.base.errors import InputError
from flsim.base.files import file_digest
from flsim.canaries.elsewhere import FILES, CanarySet, OtherUsers, Rows, WordList
from flsim.canaries.population import roster_of
from flsim.results.rows import read_run_file
from flsim.runs.elsewhere import CanariesElsewhere, OtherModel
from flsim.runs.folder import Run, load_model

OF_OURS = """
from flsim.models.architectures import build
from flsim.models.architectures import ModelHParams

def ours(vocabulary, embedding, units):
    return build(vocabulary, ModelHParams(embedding, units))

def forwarded(vocabulary, embedding, units):
    from flsim import from_forward
    words = list(range(1, vocabulary - 3))
    return from_forward(ours(vocabulary, embedding, units), 21, words, bos=vocabulary - 2, eos=vocabulary - 1)
"""


@pytest.fixture
def copied(trained_here: Trained, tmp_path: Path) -> Run:
    """Return a run; write its evaluated checkpoints to weights/ like another trainer, and a list of its canaries."""
    run = Run.open(trained_here("evaluation.every=2", "canaries.controls=4"))
    (tmp_path / "ours.py").write_text(OF_OURS)
    (tmp_path / "weights").mkdir()
    for path in (run.path / "rows").glob("*.parquet"):
        network = load_model(run.path / "checkpoints" / f"{path.stem}.safetensors")
        torch.save({"model": network.state_dict()}, tmp_path / "weights" / f"{path.stem}.pt")
    roster = roster_of_run(run)
    listed = [
        {"id": canary.id, "tokens": list(canary.tokens), "copies": int(copies)}
        | ({"p_u": canary.p_u, "p_e": canary.p_e} if canary.is_planted else {})
        for canary, copies in zip(run.canaries, roster["insertions"], strict=True)
    ]
    (tmp_path / "canaries.json").write_text(json.dumps(listed))
    return run


def measured(copied: Run, flsim: Flsim, folder: Path, *options: object) -> tuple[int, str, str]:
    """Measure the copies as a model that was trained elsewhere."""
    model, evaluation = copied.config.model, copied.config.evaluation
    arguments = {"vocabulary": copied.corpus.layout.vocabulary_size, "embedding": model.embedding, "units": model.units}
    sets = [part for name, value in arguments.items() for part in ("--set", f"{name}={value}")]
    about = {"seed": copied.config.seed, "references": evaluation.references, "beam-width": evaluation.beam_width}
    sets += [part for name, value in about.items() for part in (f"--{name}", str(value))]
    where = ("--canaries", folder / "canaries.json", "--corpus", copied.config.data.corpus, "--out", folder / "theirs")
    return flsim("evaluate", "--model", f"{folder / 'ours.py'}:ours", *sets, *where, *options)


def test_rows_of_a_copy_are_those_of_the_run(copied: Run, flsim: Flsim, tmp_path: Path) -> None:
    """A folder of checkpoints gives all rounds at once, and utility, because the corpus is named."""
    code, out, err = measured(copied, flsim, tmp_path, "--state", tmp_path / "weights")
    assert code == 0, err
    assert all(f"ours(vocabulary=40, embedding=8, units=12), round {round_}" in out for round_ in (2, 4))
    assert "|Round|" not in out.replace(" ", "")
    assert "0/0 of 4" in out  # controls
    own, theirs = rows(copied.path), rows(tmp_path / "theirs")
    assert own["round"].nunique() > 1
    pd.testing.assert_frame_equal(theirs, own, check_exact=False, rtol=0, atol=1e-6)


def test_rows_of_canaries_are_equal_for_a_module_with_other_ids(copied: Run, flsim: Flsim, tmp_path: Path) -> None:
    """Utility is not compared: all ids that are not words are the unknown word, which can become the first guess."""
    path = tmp_path / "round-4.safetensors"
    save_file(load_model(max((copied.path / "checkpoints").iterdir())).state_dict(), path)
    factory = ("--model", f"{tmp_path / 'ours.py'}:forwarded")
    code, _, err = measured(copied, flsim, tmp_path, "--state", path, *factory)
    assert code == 0, err
    own, theirs = (
        table.query("round == 4 and canary != ''").reset_index(drop=True)
        for table in (rows(copied.path), rows(tmp_path / "theirs"))
    )
    assert len(own) > 20
    pd.testing.assert_frame_equal(theirs, own, check_exact=False, rtol=0, atol=1e-6)


@pytest.fixture
def drawn(copied: Run) -> CanarySet:
    """Return the canaries that `flsim data canaries` draws for the run's words, users, settings and seed."""
    vocabulary, layout = copied.corpus.vocabulary, copied.corpus.layout
    counts = np.diff(copied.corpus.split("train").user_offsets)
    users = OtherUsers(tuple(copied.corpus.split("train").names), counts)
    words = WordList(copied.corpus.path, vocabulary, layout)
    return CanarySet.draw(words, users, copied.config.canaries, copied.config.seed, copied.config.evaluation.prefix)


def test_drawn_canaries_equal_those_of_a_run_over_equal_users(copied: Run, drawn: CanarySet) -> None:
    """Phrases, coins, sharers and copies are equal. The run redrew no phrase, because its corpus has none of them."""
    roster = roster_of_run(copied)
    roster = roster.assign(**{name: roster[name].map(list) for name in ("tokens", "words")})
    pd.testing.assert_frame_equal(roster_of(drawn.planting, copied.corpus.vocabulary), roster)


def roster_of_run(run: Run) -> pd.DataFrame:
    return pd.read_parquet(run.path / "planted" / "roster.parquet")


@pytest.mark.parametrize("kind", ["parquet", "instructions"])
def test_listed_records_have_the_copies_of_the_roster(drawn: CanarySet, tmp_path: Path, kind: Rows) -> None:
    """If the listed records are replaced, each canary has the roster's numbers of copies and of users."""
    drawn.write(tmp_path / "planted", kind)
    path = tmp_path / "planted" / FILES[kind]
    rows = pd.read_parquet(path) if kind == "parquet" else pd.read_json(path, lines=True)
    texts = rows["prompt"] + rows["completion"] if kind == "instructions" else rows["text"]
    assert not rows.duplicated(["user", "record"]).any()
    assert (rows["record"] < rows["user"].map(dict(zip(drawn.users.names, drawn.users.counts, strict=True)))).all()
    roster = roster_of(drawn.planting, drawn.words.vocabulary)
    assert rows["canary"].value_counts().to_dict() == {
        canary: copies for canary, copies in zip(roster["canary"], roster["insertions"], strict=True) if copies
    }
    phrases = dict(zip(roster["canary"], roster["words"].map(" ".join), strict=True))
    assert texts.tolist() == rows["canary"].map(phrases).tolist()
    sharers = rows.groupby("canary")["user"].nunique().to_dict()
    assert sharers == {c: n for c, n in zip(roster["canary"], roster["sharers"], strict=True) if n}
    assert CanarySet.read(tmp_path / "planted").identity == drawn.identity


def test_canaries_that_somebody_chose_are_refused(drawn: CanarySet, tmp_path: Path) -> None:
    """They are refused even if the digests are updated to match."""
    drawn.write(tmp_path / "planted")
    manifest, roster = tmp_path / "planted" / "canaries.json", tmp_path / "planted" / "roster.parquet"
    whole = json.loads(manifest.read_text())
    table = pd.read_parquet(roster)
    table["tokens"] = table["tokens"].map(lambda tokens: tokens[::-1])
    table.to_parquet(roster, index=False)
    with pytest.raises(InputError, match=r"roster\.parquet has changed"):
        CanarySet.read(tmp_path / "planted")
    whole["files"]["roster.parquet"] = file_digest(roster)
    manifest.write_text(json.dumps(whole))
    with pytest.raises(InputError, match="not those that the law draws, so they prove nothing"):
        CanarySet.read(tmp_path / "planted")
    with pytest.raises(InputError, match=r"has no canaries\.json; name a folder that `flsim data canaries` wrote"):
        CanarySet.read(tmp_path / "weights")


def test_an_audit_of_a_copy_equals_the_audit_of_the_run(
    copied: Run, drawn: CanarySet, flsim: Flsim, tmp_path: Path
) -> None:
    """All rows are equal, because weights, canaries, users and references of both measurements are equal."""
    drawn.write(tmp_path / "planted")
    code, _, err = measured(
        copied, flsim, tmp_path, "--state", tmp_path / "weights", "--canaries", tmp_path / "planted"
    )
    assert code == 0, err
    audits = [
        pd.read_csv(io.StringIO(flsim("audit", path, "--threshold", "3", "--format", "csv")[1]))
        for path in (copied.path, tmp_path / "theirs")
    ]
    own, theirs = (audit.drop(columns=["run", "setting"]) for audit in audits)
    assert {"tpr", "epsilon"} <= set(own["method"])
    pd.testing.assert_frame_equal(theirs, own, check_exact=False, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("once") / "theirs"


@pytest.fixture
def theirs(copied: Run, drawn: CanarySet, flsim: Flsim, tmp_path: Path, measured_once: Path) -> Path:
    """Return measurements of a copy with drawn canaries, made once; each test has a copy that names its files."""
    if not measured_once.exists():
        drawn.write(tmp_path / "planted")
        options = ("--state", tmp_path / "weights", "--canaries", tmp_path / "planted")
        assert measured(copied, flsim, tmp_path, *options)[0] == 0
        for record in (tmp_path / "theirs" / "models").iterdir():
            record.write_text(record.read_text().replace(str(tmp_path), "@FOLDER@"))
        (tmp_path / "theirs").rename(measured_once)
    shutil.copytree(measured_once, tmp_path / "theirs")
    for record in (tmp_path / "theirs" / "models").iterdir():
        record.write_text(record.read_text().replace("@FOLDER@", str(tmp_path)))
    return tmp_path / "theirs"


@pytest.mark.parametrize("arguments", ["table", "trace --csv", "canaries", "report --out r.html"])
def test_commands_read_measurements_like_a_run(
    theirs: Path, flsim: Flsim, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(theirs.parent)
    command, *options = arguments.split()
    code, out, err = flsim(command, theirs, *options)
    assert code == 0, err
    assert out or (theirs.parent / options[-1]).stat().st_size
    assert "sharer" not in out


@pytest.mark.parametrize("command", ["forgetting", "verify", "privacy", "membership --unit user"])
def test_commands_that_need_the_training_are_refused(theirs: Path, flsim: Flsim, command: str) -> None:
    name, *options = command.split()
    assert "trained elsewhere" in refusal(flsim, name, theirs, *options)


def named(theirs: Path) -> tuple[str, str]:
    return "--model", f"{theirs.parent / 'ours.py'}:ours"


def test_extraction_from_a_copy_equals_extraction_from_the_run(copied: Run, theirs: Path, flsim: Flsim) -> None:
    """All numbers of canaries are equal, with weights loaded again from the paths in the folder."""
    code, out, err = flsim("extract", copied.path, "--json")
    assert code == 0, err
    own = pd.DataFrame(json.loads(out)["strings"]).query("kind == 'canary'").reset_index(drop=True)
    code, out, err = flsim("extract", theirs, *named(theirs), "--json")
    assert code == 0, err
    found = pd.DataFrame(json.loads(out)["strings"])
    assert len(found) == 2 * len(copied.canaries)  # prefixes of 1 and 3 words
    differ = ["run", "setting", "series"]
    pd.testing.assert_frame_equal(found.drop(columns=differ), own.drop(columns=differ), check_dtype=False, atol=1e-6)


def test_membership_and_extraction_of_records_in_files(copied: Run, theirs: Path, flsim: Flsim) -> None:
    """All attacks run. Members with a canary, and non-members that are also training records, are excluded."""
    corpus, phrase = copied.corpus, copied.canaries[0].tokens
    texts = {
        name: [[*map(int, record)] for user in range(len(split)) for record in split[user]]
        for name, split in ((name, corpus.split(name)) for name in ("train", "test"))
    }
    for name, records in (("train", [*texts["train"], [*phrase]]), ("test", [*texts["test"], texts["train"][0]])):
        lines = [json.dumps({"body": corpus.vocabulary.text(record)}) for record in records]
        (theirs.parent / f"{name}.jsonl").write_text("\n".join(lines))
    files = ("--members", theirs.parent / "train.jsonl", "--non-members", theirs.parent / "test.jsonl")
    options = (*named(theirs), *files, "--text-column", "body")
    code, out, err = flsim("membership", theirs, *options, "--json")
    assert code == 0, err
    (run,) = json.loads(out)["runs"]
    attacks = pd.DataFrame(run["rows"]).set_index("attack")
    assert {"loss", "reference", "zlib", "min-k", "min-k++", "neighbourhood", "quantile"} <= {*attacks.index}
    others = [record for record in texts["test"] if record not in texts["train"]]
    lengths = [np.bincount([len(record) for record in side], minlength=10) for side in (texts["train"], others)]
    pairs = int(np.minimum(*lengths).sum())
    assert (attacks["n_in"]["loss"], attacks["n_out"]["loss"]) == (pairs, pairs)
    code, out, err = flsim("extract", theirs, *options, "--prefix", "1", "--json")
    assert code == 0, err
    strings = pd.DataFrame(json.loads(out)["strings"])
    assert set(strings["kind"]) == {"canary", "record"}
    is_in_file = (strings["name"] == copied.canaries[0].id) | (strings["kind"] == "record") & strings["is_trained"]
    assert strings["k_records"][is_in_file].min() >= 1


def test_a_model_that_is_not_the_measured_one_is_refused(theirs: Path, flsim: Flsim) -> None:
    """Each refusal is one line. flsim detects each new change before the earlier ones, and executes no changed code."""
    record = theirs / "models" / "round-000004.json"
    weights, executed = Path(json.loads(record.read_text())["weights"]), theirs.parent / "executed"

    def refused(*options: object) -> str:
        return refusal(flsim, "extract", theirs, *options)

    assert f"flsim executes only code that you name; if you trust it, add {' '.join(named(theirs))}" in refused()
    assert "name both files" in refused(*named(theirs), "--members", "train.jsonl")
    assert "has no model of round 99; measured rounds are 2, 4" in refused(*named(theirs), "--round", "99")
    values = torch.load(weights)["model"]
    torch.save({name: value + 1 for name, value in values.items()}, weights)
    assert f"{weights}: not the parameters that" in refused(*named(theirs))
    weights.unlink()
    assert "no such file of weights; restore it, or measure the model again" in refused(*named(theirs))
    (theirs.parent / "ours.py").write_text(f"open({str(executed)!r}, 'w')\n{OF_OURS}")
    assert "ours.py is not the code that" in refused(*named(theirs))
    assert not executed.exists()
    record.write_text('{"weights": 3, "digest": null}')
    assert "does not describe a model; measure the model again" in refused(*named(theirs))
    shutil.rmtree(record.parent)
    assert "does not name its model; measure it again with flsim evaluate --model --out" in refused(*named(theirs))


def test_an_audit_needs_the_law_of_the_measured_canaries(theirs: Path, flsim: Flsim) -> None:
    """An audit is refused with the folder of other canaries, and without any law."""

    def refused() -> str:
        return refusal(flsim, "audit", theirs)

    drawn = CanarySet.read(theirs / "planted")
    shutil.rmtree(theirs / "planted")
    again = CanarySet.draw(drawn.words, drawn.users, drawn.hparams, drawn.seed + 1, drawn.prefix)
    again.write(theirs / "planted")
    assert "its canaries are not those that were measured; measure the model again" in refused()
    (theirs / "planted" / "canaries.json").unlink()
    assert "has no law of its canaries, so nothing can be proven; draw canaries with flsim data canaries" in refused()


def test_a_run_refuses_the_options_of_models_from_elsewhere(copied: Run, flsim: Flsim) -> None:
    for command in ("membership", "extract"):
        assert "which stores model and records; remove the option" in refusal(
            flsim, command, copied.path, "--model", "ours.py:ours"
        )


def test_listed_canaries_prove_nothing(copied: Run, flsim: Flsim, tmp_path: Path) -> None:
    """Canaries that were listed by hand are measured and shown, but an audit refuses them."""
    assert measured(copied, flsim, tmp_path, "--state", tmp_path / "weights")[0] == 0
    assert flsim("table", tmp_path / "theirs")[0] == 0
    assert "has nothing that proves anything. The canaries were listed by hand" in refusal(
        flsim, "audit", tmp_path / "theirs"
    )
    listed = json.loads((tmp_path / "canaries.json").read_text())
    (tmp_path / "canaries.json").write_text(
        json.dumps([{k: v for k, v in one.items() if k != "copies"} for one in listed])
    )
    code, _, err = measured(copied, flsim, tmp_path, "--state", tmp_path / "weights", "--out", tmp_path / "more")
    assert (code, (tmp_path / "more").exists()) == (2, False)
    assert "add the column copies, 0 for a control, or remove --out" in err


def test_a_folder_accepts_more_rounds_of_only_the_same_settings(copied: Run, flsim: Flsim, tmp_path: Path) -> None:
    """A round measured again replaces its rows. Other settings or names, and folders of other files, are refused."""
    first, *_, last = sorted((tmp_path / "weights").iterdir())
    for path, options in ((first, ()), (last, ()), (last, ())):
        assert measured(copied, flsim, tmp_path, "--state", path, *options)[0] == 0
    assert sorted(rows(tmp_path / "theirs")["round"].unique()) == [int(p.stem[6:]) for p in (first, last)]
    before = {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("*") if path.is_file()}
    code, _, err = measured(copied, flsim, tmp_path, "--state", first, "--prefix", "2")
    assert (code, "has measurements of other canaries or with other settings" in err) == (2, True)
    code, _, err = measured(copied, flsim, tmp_path, "--state", first, "--name", "other")
    assert (code, "not of other; add --name" in err) == (2, True)
    code, _, err = measured(copied, flsim, tmp_path, "--state", first, "--out", tmp_path / "weights")
    assert (code, "exists, and has no measurements of a model; name another folder" in err) == (2, True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("*") if path.is_file()}


def test_a_later_checkpoint_that_fails_ends_the_measurements(copied: Run, flsim: Flsim, tmp_path: Path) -> None:
    """The status is then failed, not running. The same command completes the folder with a correct checkpoint."""
    newest = max((tmp_path / "weights").iterdir())
    right = newest.read_bytes()
    torch.save({"model": {"embedding": torch.zeros(2)}}, newest)
    code, _, err = measured(copied, flsim, tmp_path, "--state", tmp_path / "weights")
    assert code == 2
    described = read_run_file(tmp_path / "theirs")
    assert (described["status"], described["reason"] in err) == ("failed", True)
    newest.write_bytes(right)
    assert measured(copied, flsim, tmp_path, "--state", tmp_path / "weights")[0] == 0
    assert read_run_file(tmp_path / "theirs")["status"] == "completed"


@pytest.mark.parametrize(("records", "is_crowded"), [(8, False), (7, True)])
def test_users_of_mostly_canaries_cause_a_warning(tmp_path: Path, flsim: Flsim, records: int, is_crowded: bool) -> None:
    """Four copies are half of eight records, but more than half of seven. The stored set has the warning for audits."""
    (tmp_path / "words.txt").write_text("".join(f"word{index}\n" for index in range(50)))
    where = ("--vocabulary", tmp_path / "words.txt", "--users", "1", "--records", str(records), "--out", tmp_path / "p")
    code, _, err = flsim("data", "canaries", *where, "--set", "insertions=[4]", "--set", "count=1")
    assert code == 0, err
    assert ("more than half of all records (57.1%)" in err) == is_crowded
    assert bool(CanarySet.read(tmp_path / "p").warning) == is_crowded
    (tmp_path / "words.txt").write_text("")
    assert "words.txt: must have one word per line, at least one" in flsim("data", "canaries", *where)[2]


def test_the_error_of_a_missing_column_names_the_columns_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("client,post\na,b\n")
    with pytest.raises(InputError, match=r"columns user cannot be read \(found columns client, post\)"):
        OtherUsers.in_file(path)


def test_a_summary_of_an_untrained_model(copied: Run, drawn: CanarySet, flsim: Flsim, tmp_path: Path) -> None:
    """No phrase is detected, and the largest memorized share is the bound of Clopper and Pearson."""
    drawn.write(tmp_path / "planted")
    code, _, err = measured(copied, flsim, tmp_path, "--canaries", tmp_path / "planted", "--references", "400")
    assert code == 0, err
    code, out, err = flsim("audit", tmp_path / "theirs", "--summary")
    assert code == 0, err
    planted = int((drawn.planting.insertions > 0).sum())
    share = 1 - 0.05 ** (1 / planted)  # the bound for no hit in n trials
    text = " ".join(out.split())
    assert "Memorization is not proven: no phrase of the training data is detected." in text
    assert "A loss of privacy of one user is not proven: no lower bound on epsilon is above 0." in text
    assert "That these phrases are not memorized: of phrases" in text
    assert f"up to {100 * share:.0f}% may be detectable (95% confidence)" in text
    assert "differential privacy with epsilon below" not in text


@pytest.mark.parametrize(
    ("factory", "is_random"), [("layer", True), ("layer.apply(lambda one: nn.init.ones_(one.weight))", False)]
)
def test_weights_that_are_random_are_a_warning(
    drawn: CanarySet, tmp_path: Path, capsys: pytest.CaptureFixture[str], factory: str, is_random: bool
) -> None:
    (tmp_path / "fresh.py").write_text(
        f"from torch import nn\n\ndef made():\n    layer = nn.Linear(2, 2, False)\n    return {factory}\n"
    )
    OtherModel(f"{tmp_path / 'fresh.py'}:made", {}).load(None, CanariesElsewhere.of_folder(drawn, tmp_path))
    assert ("two calls of the function make different weights" in capsys.readouterr().err) == is_random


def test_weights_that_do_not_fit_are_named(copied: Run, flsim: Flsim, tmp_path: Path) -> None:
    """The error is one line with the names of parameters, and no folder of measurements is written."""
    path = next((tmp_path / "weights").iterdir())
    weights = torch.load(path)["model"]
    first, second, *_, last = weights
    wrong = weights[last].clone()
    wrong.view(-1)[:2] = torch.tensor([np.nan, np.inf])
    cases = {
        f"2 of {wrong.numel():,} values of parameter {last} are not finite; measure": weights | {last: wrong},
        f'Missing key(s) in state_dict: "{first}".': {name: weights[name] for name in weights if name != first},
        f"size mismatch for {second}: ": weights | {second: wrong.view(-1)[:2]},
    }
    for message, values in cases.items():
        torch.save(values, path)
        code, out, err = measured(copied, flsim, tmp_path, "--state", path)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert f"{path}: " in err
        assert message in err
        assert not (tmp_path / "theirs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [".theirs.partial-*", "theirs/run.json", "theirs/rows/round-000004.parquet"])
def test_a_killed_measurement_is_never_read_as_complete(copied: Run, flsim: Flsim, tmp_path: Path, moment: str) -> None:
    """SIGKILL ends a process as soon as a file exists. The same command completes the folder to equal bytes."""
    options = ("--state", tmp_path / "weights")
    assert measured(copied, flsim, tmp_path, *options)[0] == 0
    whole = folder_bytes(tmp_path / "theirs")
    command = list[object]()

    def named_only(*words: object) -> tuple[int, str, str]:
        command.extend(words)
        return 0, "", ""

    measured(copied, named_only, tmp_path, *options)
    (tmp_path / "killed").mkdir()
    command[command.index(tmp_path / "theirs")] = folder = tmp_path / "killed" / "theirs"
    words = [sys.executable, "-m", "flsim", *map(str, command)]
    for _ in range(10):  # on a busy machine, the process can end before this loop sees the file
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(folder.parent.glob(moment)):
            pass
        process.kill()
        if process.wait() == -signal.SIGKILL:
            break
        shutil.rmtree(folder)
    assert process.returncode == -signal.SIGKILL
    if folder.exists() and folder_bytes(folder) != whole:
        assert read_run_file(folder)["status"] == "running"
        code, out, err = flsim("table", folder)
        assert (code, "running" in out) == (0, True), err
    code, _, err = flsim(*command)
    assert code == 0, err
    assert folder_bytes(folder) == whole
    assert [*folder.parent.iterdir()] == [folder]


@pytest.mark.parametrize("fault", ["model", "manifest", "place"])
def test_refused_input_leaves_no_output(
    copied: Run, drawn: CanarySet, flsim: Flsim, tmp_path: Path, fault: str
) -> None:
    """Each refusal is one line, and leaves no new file or folder, including parents of the output."""
    drawn.write(tmp_path / "planted")
    (tmp_path / "file").write_text("")
    out, options = tmp_path / "new" / "theirs", list[object]()
    if fault == "model":
        options = ["--model", tmp_path / "nowhere.py:load"]
    elif fault == "manifest":
        path = tmp_path / "planted" / "canaries.json"
        path.write_text(path.read_text().replace('"seed"', '"seeds"'))
    else:
        out = tmp_path / "file" / "theirs"
    before = folder_bytes(tmp_path), sorted(tmp_path.rglob("*"))
    options += ["--state", tmp_path / "weights", "--canaries", tmp_path / "planted", "--out", out]
    code, printed, err = measured(copied, flsim, tmp_path, *options)
    assert (code, printed, len(err.splitlines())) == (2, "", 1), err
    assert (folder_bytes(tmp_path), sorted(tmp_path.rglob("*"))) == before
