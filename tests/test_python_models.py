"""`flsim.load_model` and `flsim.epsilon`: the network of a checkpoint as a torch module, and what a state spent."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import TINY, Experiment, final_params
from own_model import SECTION, TINY_OWN, write_model

import flsim
from flsim.models.architectures import restore
from flsim.runs.folder import Run

PRIVATE = flsim.Privacy("dp", clip=0.5, noise_multiplier=1.0)


def trained(experiment: Experiment) -> Path:
    """The last checkpoint of a run."""
    experiment.call("run", experiment.config, "--out", "run", "--in-process")
    return experiment.folder / "run" / "checkpoints" / "round-000004.safetensors"


def test_a_checkpoint_of_a_built_in_network(experiment: Experiment) -> None:
    """Wherever the file lies, and without the corpus."""
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


def test_a_checkpoint_of_a_network_of_a_users_own(experiment: Experiment) -> None:
    """The code is the copy in the run folder; without it, or with another version of it, the checkpoint is refused."""
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
    """In the words of Python, and not of a command's option."""
    file = tmp_path / "round-000001.safetensors"
    file.write_bytes(b"nothing")
    with pytest.raises(flsim.InputError, match=r"round-000001.safetensors: not a checkpoint of flsim, or damaged"):
        flsim.load_model(file)
    with pytest.raises(flsim.InputError, match=r"^model: name a factory, as package.module:factory"):
        flsim.load_model("model")
    (tmp_path / "model.py").write_text("def factory():\n    raise KeyError('x')\n")
    with pytest.raises(flsim.InputError, match=r"^.*model.py:factory: failed with KeyError"):
        flsim.load_model(f"{tmp_path}/model.py:factory")


def test_epsilon_is_that_of_flsim_privacy(experiment: Experiment) -> None:
    """By every convention of the sampler; by default those that a run reports, at 1 / (10 N)."""
    planted = flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))
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


def test_epsilon_without_noise_without_rounds_and_of_no_convention(experiment: Experiment) -> None:
    planted = flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))
    (state,) = flsim.simulate(planted, flsim.Model(3, 5), flsim.FedAvg(cohort=5), 1)
    assert set(flsim.epsilon(state).values()) == {math.inf}
    with pytest.raises(flsim.InputError, match="'poisson-pld' is not for fixed-size sampling; use paper, "):
        flsim.epsilon(state, conventions=["poisson-pld"])
    with pytest.raises(flsim.InputError, match="conventions must be a list, such as"):
        flsim.epsilon(state, conventions="paper")
    with pytest.raises(flsim.InputError, match="the state has no completed round"):
        flsim.epsilon(flsim.State(0, {}))


def test_epsilon_of_a_run_s_state(experiment: Experiment) -> None:
    experiment.config.write_text(
        TINY.replace("[local]", '[privacy]\nmechanism = "dp"\nclip = 0.5\nnoise_multiplier = 1.0\n[local]')
    )
    trained(experiment)
    run = flsim.open_run(experiment.folder / "run")
    state = run.latest_state()
    assert flsim.epsilon(state) == run.epsilons(state)
