"""Server optimizers of a user's own, and runs with all kinds of own optimizers, on Ray too."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment
from own_optimizers import OWN

from flsim.algorithms import server_optimizers
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import InputError, RunFailed
from flsim.base.rng import stream
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.planning.plan import checkpoint_bytes
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my_optimizers.py"
    path.write_text(OWN)
    return path


def updates() -> list[Params]:
    rng, shapes = stream(0, "test", "own updates"), {"a": (3, 2), "b": (5,)}
    return [{name: torch.from_numpy(rng.normal(size=shape)) for name, shape in shapes.items()} for _ in range(9)]


def stepped(hparams: ServerOptimizerHParams) -> Params:
    params = {"a": torch.ones(3, 2, dtype=torch.float64), "b": torch.zeros(5, dtype=torch.float64)}
    moments = server_optimizers.init(params, hparams)
    for update in updates():
        params, moments = server_optimizers.apply(params, update, moments, hparams)
    return params


def test_fedadam_written_again_equals_the_built_in_one_bit_for_bit(own: Path) -> None:
    settings = ServerOptimizerHParams("adam", 0.1, 0.9, 0.95, 0.01)
    mine = stepped(replace(settings, server_optimizer=f"{own}:fedadam"))
    assert all(torch.equal(mine[name], value) for name, value in stepped(settings).items())


def test_a_server_optimizer_sees_all_tensors(own: Path) -> None:
    """Every step of the normalized one is eta long, over both tensors, along the corrected mean, by hand."""
    beta, eta = 0.8, 0.25
    params = stepped(ServerOptimizerHParams(f"{own}:normalized", eta, beta))
    x = [1.0] * 6 + [0.0] * 5
    m = [0.0] * 11
    for count, update in enumerate(updates(), start=1):
        d = torch.cat([update["a"].flatten(), update["b"]]).tolist()
        m = [beta * old + (1 - beta) * new for old, new in zip(m, d, strict=True)]
        mean = [value / (1 - beta**count) for value in m]
        norm = sum(value**2 for value in mean) ** 0.5
        x = [old + eta * value / norm for old, value in zip(x, mean, strict=True)]
    trained = torch.cat([params["a"].flatten(), params["b"]])
    torch.testing.assert_close(
        trained, torch.tensor(x, dtype=torch.float64), rtol=0, atol=1e-6
    )  # steps count in float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad", "'x': names or shapes differ from those of the model's parameters"),
        ("alone", "takes 1 positional argument but 2 were given; it needs init(x, settings) and apply(x, D, moments"),
        ("forgetful", "the step changes the slots ['m', 'step'] into []; keep the same slots"),
        (
            "halves",
            "found function, not a ServerOptimizer; create one with flsim.algorithms.server_optimizers.ServerOptimizer",
        ),
    ],
)
def test_a_server_optimizer_that_is_none_is_refused(own: Path, name: str, message: str) -> None:
    hparams = ServerOptimizerHParams(f"{own}:{name}")
    with pytest.raises(InputError) as caught:
        server_optimizers.refuse_unfit(hparams, 12, ModelHParams(3, 5))
    assert message in str(caught.value)


def test_an_error_in_a_later_round_names_the_line(own: Path) -> None:
    own.write_text(
        OWN
        + """

def _late(x, d, moments, eta, settings):
    if not any(d[name].any() for name in d):
        raise ZeroDivisionError("nothing to follow")
    return x, {}


late = ServerOptimizer("Late", lambda x, settings: {}, _late)
"""
    )
    hparams = ServerOptimizerHParams(f"{own}:late")
    server_optimizers.refuse_unfit(hparams, 12, ModelHParams(3, 5))
    zero = {"a": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(RunFailed, match=r"my_optimizers\.py:\d+: ZeroDivisionError: nothing to follow$"):
        server_optimizers.apply(zero, zero, {}, hparams)


def test_rows_digests_and_plans_know_ones_own(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(experiment.folder)
    own = experiment.folder / "my_optimizers.py"
    own.write_text(OWN)

    plain, mine = (
        load_config(experiment.config, overrides)
        for overrides in ((), ("training.server_optimizer=my_optimizers.py:normalized",))
    )
    assert mine.setting == "Non-IID, FedAvg+Normalized, b_u=6"
    assert mine.digest != plain.digest
    assert checkpoint_bytes(mine, 40) == 2 * checkpoint_bytes(plain, 40)  # a mean like the model, and a count
    before = mine.digest
    own.write_text(OWN + "# another version\n")
    assert mine.digest != before


def test_the_document_s_optimizers_train(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(experiment.folder)
    text = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    code, settings = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "toml"))
    (experiment.folder / "my_optimizers.py").write_text(code)
    overrides = [
        f"{section}.{name}={value if isinstance(value, float) else repr(value)}"
        for section, values in tomllib.loads(settings).items()
        for name, value in values.items()
    ]
    run = Run.create(load_config(experiment.config, overrides), experiment.folder / "run")
    training = run.training()
    *_, state = training.states(training.first_state(), 3)
    assert state.round == 3
    assert state.moments.keys() == {"m"}
    assert run.setting == "Non-IID, FedAvg+Normalized, b_u=6"
    first = training.first_state().params
    away = sum(float((value - first[name]).square().sum()) for name, value in state.params.items()) ** 0.5
    eta = [0.3 * (1 + math.cos(math.pi * round_ / 4)) / 2 for round_ in range(3)]
    assert 0 < away < 1.001 * sum(eta)  # three steps, each as long as the schedule says
