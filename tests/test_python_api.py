"""The Python API: code of docs/python.md, imports of `import flsim`, wrong arguments, models and epsilon."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import Experiment, Trained, final_params
from own_model import SECTION, TINY_OWN, write_model

import flsim
from flsim.models.architectures import restore
from flsim.results.rows import read_run
from flsim.runs.folder import Run
from flsim.training.optimizers import optimizer_named

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "python.md"
SHORT = 4  # rounds, with two evaluations


def test_importing_loads_nothing_large() -> None:
    code = """
import sys
site = {name.split(".")[0] for name in sys.modules}  # what an environment loads at its start
import flsim
assert {name.split(".")[0] for name in sys.modules} <= {"flsim", *sys.stdlib_module_names, "__main__", *site}
assert set(flsim.__all__) <= set(dir(flsim))
import flsim.cli  # what `flsim --help` loads
assert not {"matplotlib", "numpy", "pandas", "scipy", "torch"} & set(sys.modules)
flsim.simulate, flsim.evaluate
assert not {"ray", "flwr"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_state_is_shown_without_its_tensors(planted: flsim.Planted) -> None:
    algorithm = flsim.FedAvg(cohort=5, server=flsim.ServerOptimizer("adam", 0.1), shards=1)
    (state,) = flsim.simulate(planted, flsim.Model(3, 5), algorithm, 1)
    assert state.params
    assert state.moments
    assert repr(state).startswith("State(round=1, values=")
    assert "tensor" not in repr(state)


def test_every_public_name_is_documented_in_the_code() -> None:
    for name in flsim.__all__:
        assert getattr(flsim, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'audits_'"):
        _ = flsim.audits_  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_guide_gives_the_rows_of_runs(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's simulations have the same rows as its runs; all its code runs in one process, with fewer rounds."""
    monkeypatch.chdir(experiment.folder)
    (experiment.folder / "experiments").mkdir()
    shutil.copy(ROOT / "experiments" / "demo.toml", experiment.folder / "experiments")
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    code = "\n".join(blocks)
    length = 'f"training.rounds={rounds}"'
    less = '"evaluation.every_epochs=0.1", "evaluation.references=500"'
    shorter = {"rounds = 200": f"rounds = {SHORT}", "every=40": "every=2", "20_000": "500", length: f"{length}, {less}"}
    for old, new in shorter.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    script = experiment.folder / "guide.py"
    save = "\nfor (partition, after), found in rows.items():\n    found.to_parquet(f'{partition}-{after}.parquet')\n"
    script.write_text(code + save, encoding="utf-8")
    subprocess.run([sys.executable, script], check=True, cwd=experiment.folder)
    for partition in ("iid", "non-iid"):
        stored = read_run(experiment.folder / "runs" / partition).rows
        assert sorted(stored["round"].unique()) == [2, SHORT]
        for after, ours in stored.groupby("round"):
            simulated = pd.read_parquet(experiment.folder / f"{partition}-{after}.parquet")
            pd.testing.assert_frame_equal(_sorted(simulated), _sorted(ours), check_exact=True)
    for name in ("memorization.png", "report.html"):
        assert (experiment.folder / name).stat().st_size > 10_000


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """Return sorted rows without the run's identity, which a simulation does not have."""
    columns = ["round", "metric", "canary", "value"]
    return rows[columns].sort_values(columns[:3]).reset_index(drop=True)


MODEL = flsim.Model(3, 5)
ALGORITHM = flsim.FedAvg(cohort=5, shards=1)
OWN = r"name custom code as 'path/to/file\.py:NAME'"


@pytest.fixture
def planted(experiment: Experiment) -> flsim.Planted:
    return flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))


def anything(value: object) -> Any:
    """Return a value as type Any, for arguments that a notebook can pass because no type checker reads it."""
    return value


def message_of(call: Callable[[], object]) -> str:
    """Return the one-line message of the InputError that the call itself raises."""
    with pytest.raises(flsim.InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flsim.Model(architecture=anything(dict)), f"architecture must be a name; {OWN}, found the class dict"),
        (lambda: flsim.FedAvg(cohort=anything(10.5)), r"cohort must be an integer, found 10\.5"),
        (lambda: flsim.FedAvg(local=anything({})), r"local must be a flsim\.LocalSGD, found a dict"),
        (lambda: flsim.Privacy(anything("dpp"), clip=1.0), "mechanism must be 'none', 'clip' or 'dp', found 'dpp'"),
        (lambda: flsim.Canaries(p_u=anything(0.1)), r"p_u must be a list, such as \[0\.1\], found 0\.1"),
        (lambda: flsim.Canaries(cuont=3), "cuont is not a setting"),  # type: ignore[call-arg]
        (lambda: flsim.infer_membership("runs/x", attacks="loss"), r"attacks must be a list, such as \['loss'\]"),
        (lambda: flsim.infer_users("runs/x", device="gpu"), "device gpu: torch finds no such device; use cpu"),
        (lambda: flsim.extract_personal_data(anything(["runs/x"])), r"runs: found a list, not a path; .* \*runs"),
        (lambda: flsim.frames(anything(["runs/x"])), r"runs: found a list, not a path; .* \*runs"),
        (lambda: flsim.run("x.toml", "runs/x", overrides="training.rounds=3"), r"overrides must be a list, such as \["),
        (lambda: flsim.sweep("x.toml", "runs/x", seeds=anything(5)), r"seeds must be a list, such as \[5\]"),
        (lambda: flsim.sweep("x.toml", "runs/x", at_once=0), "at_once must be at least 1, found 0"),
    ],
)
def test_wrong_settings_are_refused_by_the_call_that_gets_them(call: Callable[[], object], message: str) -> None:
    assert re.search(message, message_of(call))


def test_numbers_of_numpy_and_lists_are_taken(planted: flsim.Planted) -> None:
    canaries = flsim.Canaries(p_u=anything([0.2]), p_e=anything([np.float32(0.5)]), windows=anything([[0, 1]]))
    assert list(canaries.p_u) == [0.2]
    model = flsim.Model(anything(np.int64(3)), 5)
    (state,) = flsim.simulate(planted, model, ALGORITHM, anything(np.int64(1)), every=anything(np.int64(1)))
    assert state.round == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 2.5}, "rounds must be an integer, found 2.5"),
        ({"seed": -1}, "seed must not be negative, found -1"),
        ({"device": "gpu"}, "device gpu: torch finds no such device; use cpu"),
        ({"algorithm": "fedavg"}, "algorithm must be a flsim.FedAvg or flsim.Central, found 'fedavg'"),
        ({"start": 3}, "start must be a state of flsim.simulate, found 3"),
    ],
)
def test_wrong_arguments_of_simulate(planted: flsim.Planted, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"planted": planted, "model": MODEL, "algorithm": ALGORITHM, "rounds": 2} | changes
    with pytest.raises(flsim.InputError) as caught:  # raised by the call itself, not with the first state
        flsim.simulate(**arguments)
    assert str(caught.value) == message


def test_a_corpus_without_canaries_is_refused(experiment: Experiment, planted: flsim.Planted) -> None:
    corpus = flsim.open_corpus(experiment.folder / "corpus")
    (state,) = flsim.simulate(planted, MODEL, ALGORITHM, 1)
    expected = "planted must be what flsim.plant(corpus, ...) returns, found a Corpus"
    assert message_of(lambda: flsim.simulate(anything(corpus), MODEL, ALGORITHM, 2)) == expected
    assert message_of(lambda: flsim.audit_simulation(state, anything(corpus), MODEL, ALGORITHM)) == expected
    assert "pass the result of `flsim.plant`" in message_of(lambda: flsim.evaluate(state, anything(corpus), MODEL))
    assert message_of(lambda: flsim.plant(corpus, seed=-1)) == "seed must not be negative, found -1"


def test_a_state_of_another_model_is_neither_measured_nor_continued(planted: flsim.Planted) -> None:
    (state,) = flsim.simulate(planted, MODEL, ALGORITHM, 1)
    other = flsim.Model(4, 5)
    expected = "these parameters belong to another model; pass the settings that they were trained with"
    assert message_of(lambda: flsim.evaluate(state, planted, other, references=100)) == expected
    assert message_of(lambda: flsim.simulate(planted, other, ALGORITHM, 2, start=state)) == expected


def test_an_attack_in_the_place_of_its_name_is_refused(trained_here: Trained) -> None:
    message = message_of(lambda: flsim.infer_membership(trained_here(), attacks=[anything(len)]))
    assert re.search(f"attack must be a name; {OWN}, found <built-in function len>", message)


PRIVATE = flsim.Privacy("dp", clip=0.5, noise_multiplier=1.0)


def trained(experiment: Experiment) -> Path:
    """Train a run without Ray, and return its last checkpoint."""
    experiment.call("run", experiment.config, "--out", "run", "--in-process")
    return experiment.folder / "run" / "checkpoints" / "round-000004.safetensors"


def test_a_checkpoint_of_a_built_in_network(experiment: Experiment) -> None:
    """`flsim.load_model` returns the trained network, wherever the file is, and without the corpus."""
    path = trained(experiment)
    run = Run.open(experiment.folder / "run")
    expected = restore(final_params(run.path), run.config.model, run.corpus.layout.vocabulary_size)
    (experiment.folder / "corpus").rename(experiment.folder / "elsewhere")
    copy = shutil.copy(path, experiment.folder / "round-000004.safetensors")
    tokens = torch.tensor([[2, 5, 6]])
    for file in (path, str(copy)):
        network = flsim.load_model(file)
        assert isinstance(network, torch.nn.Module)
        assert not network.training
        assert torch.equal(network(tokens), expected(tokens))


def test_a_checkpoint_of_a_custom_network(experiment: Experiment) -> None:
    """The code is the copy in the run folder; without this copy, or if it has changed, the checkpoint is refused."""
    write_model(experiment.folder)
    experiment.config.write_text(TINY_OWN + SECTION)
    path = trained(experiment)
    (experiment.folder / "mine.py").unlink()
    network = flsim.load_model(path)
    assert type(network).__name__ == "TwistedGRU"
    for name, value in final_params(experiment.folder / "run").items():
        assert torch.equal(network.trainable[name], value)
    alone = shutil.copy(path, experiment.folder / "round-000004.safetensors")
    with pytest.raises(flsim.InputError, match="needs the files of TwistedGRU; move it back to its run folder"):
        flsim.load_model(alone)
    (code,) = (experiment.folder / "run" / "code").iterdir()
    code.write_text(code.read_text() + "\n# another version\n")
    with pytest.raises(flsim.InputError, match=r"the network differs from that of .*config\.toml"):
        flsim.load_model(path)


def test_what_is_neither_a_checkpoint_nor_a_factory_is_refused(tmp_path: Path) -> None:
    """Messages name arguments of the Python API, not options of commands."""
    file = tmp_path / "round-000001.safetensors"
    file.write_bytes(b"nothing")
    with pytest.raises(flsim.InputError, match=r"round-000001.safetensors: not a checkpoint of flsim, or damaged"):
        flsim.load_model(file)
    with pytest.raises(flsim.InputError, match=r"^model: name a checkpoint \(.safetensors\), or a factory, as package"):
        flsim.load_model("model")
    with pytest.raises(flsim.InputError, match=r"or name a run or a checkpoint \(.safetensors\)"):
        flsim.evaluate("model")
    (tmp_path / "model.py").write_text("def factory():\n    raise KeyError('x')\n")
    with pytest.raises(flsim.InputError, match=r"^.*model.py:factory: failed with KeyError"):
        flsim.load_model(f"{tmp_path}/model.py:factory")


def test_epsilon_is_that_of_flsim_privacy(experiment: Experiment, planted: flsim.Planted) -> None:
    """Both Poisson conventions give epsilon as the command does; the defaults are those of runs, RDP at 1 / (10 N)."""
    algorithm = flsim.FedAvg(cohort=5, sampler="poisson", privacy=PRIVATE)
    *_, state = flsim.simulate(planted, flsim.Model(3, 5), algorithm, 3)
    users = len(planted)
    arguments = ("--users", users, "--cohort", 5, "--rounds", 3, "--noise-multiplier", 1, "--delta", 1e-5)
    told = json.loads(experiment.call("privacy", "--sampler", "poisson", *map(str, arguments), "--json").stdout)
    expected = {row["convention"]: row["epsilon"] for row in told}
    names = ["poisson-rdp", "poisson-pld"]
    found = flsim.epsilon(state, 1e-5, names)
    assert list(found) == names
    assert all(found[name] == pytest.approx(expected[name], rel=1e-12) for name in names)
    assert flsim.epsilon(state) == flsim.epsilon(state, 1 / (10 * users), ["poisson-rdp"])


def test_epsilon_without_noise_without_rounds_and_of_no_convention(planted: flsim.Planted) -> None:
    (state,) = flsim.simulate(planted, flsim.Model(3, 5), flsim.FedAvg(cohort=5), 1)
    assert set(flsim.epsilon(state).values()) == {math.inf}
    with pytest.raises(flsim.InputError, match="'poisson-pld' is not for fixed-size sampling; use paper, "):
        flsim.epsilon(state, conventions=["poisson-pld"])
    with pytest.raises(flsim.InputError, match="conventions must be a list, such as"):
        flsim.epsilon(state, conventions="paper")
    *_, other = flsim.simulate(planted, flsim.Model(3, 5), flsim.FedAvg(cohort=5, sampler="poisson"), 2, start=state)
    with pytest.raises(flsim.InputError, match="fixed-size and poisson rounds; a convention covers only one"):
        flsim.epsilon(other)
    with pytest.raises(flsim.InputError, match="the state has no completed round"):
        flsim.epsilon(flsim.State(0, {}))


OF_RUNS = (flsim.audit, flsim.extract, flsim.infer_by_shadows, flsim.infer_membership, flsim.infer_users, flsim.reveal)


@pytest.mark.parametrize("call", [*OF_RUNS, flsim.measure_forgetting, flsim.table])
def test_a_call_without_runs_is_refused(call: Callable[[], object]) -> None:
    assert message_of(call) == "no runs: name at least one run folder or sweep folder"


def test_a_simulation_does_not_start_after_its_end(planted: flsim.Planted) -> None:
    *_, state = flsim.simulate(planted, MODEL, ALGORITHM, 2)
    for rounds in (1, 2):
        message = message_of(partial(flsim.simulate, planted, MODEL, ALGORITHM, rounds, start=state))
        assert message == f"start has completed 2 rounds; set rounds above it, found {rounds}"


def test_a_run_is_measured_at_its_newest_checkpoint_and_a_round_is_a_number(
    trained_here: Trained, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained_here(), tmp_path / "run"))
    newest = max((run / "checkpoints").glob("*.safetensors"))
    pd.testing.assert_frame_equal(flsim.evaluate(run, references=50), flsim.evaluate(str(newest), references=50))
    for call in (flsim.table, flsim.audit, partial(flsim.compare, run)):
        assert message_of(partial(call, run, round=anything("x"))) == "round must be an integer, found 'x'"
        assert message_of(partial(call, run, epoch=anything("x"))) == "epoch must be a number, found 'x'"


def test_a_threshold_is_at_least_1_and_a_repeated_attack_runs_once(trained_here: Trained, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_here(), tmp_path / "run"))
    assert message_of(lambda: flsim.audit(run, threshold=0)) == "threshold must be at least 1, found 0"
    assert len(flsim.infer_membership(run, attacks=["blind", "blind"], records=10)) == 1


def test_a_list_is_no_optimizer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("LIST = []\n")
    with pytest.raises(flsim.InputError, match=r"must be a torch\.optim\.Optimizer, a function that returns one"):
        optimizer_named(f"{tmp_path / 'mine.py'}:LIST")
