"""Tests of FedDyn of docs/algorithms.md against the paper's equations, of its option, and of a refused update."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import Experiment
from one_vector import ONE_VECTOR, USERS, Vector, frequencies, softmax
from populations import InMemory
from stepping import LAYOUT

from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import RunFailed
from flsim.models.architectures import ModelHParams
from flsim.runs import config
from flsim.runs.folder import Run
from flsim.training.update import LocalHParams
from server.launch import verify

DOCUMENT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
FEDDYN = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)[1]
STEPS, RATE = 3, 0.4
LOCAL = LocalHParams(epochs=STEPS, batch_size=10, learning_rate=RATE)


def training_of(folder: Path, source: str, options: dict[str, float], shards: int = 1) -> FederatedTraining:
    (folder / "bias.py").write_text(ONE_VECTOR)
    (folder / "feddyn.py").write_text(source)
    server = FedAvgHParams(algorithm=f"{folder}/feddyn.py:FedDyn", cohort=3, algorithm_options=options)
    model = ModelHParams(1, 1, f"{folder}/bias.py:Bias")
    return FederatedTraining(InMemory(LAYOUT, USERS), model, server, LOCAL, shards=shards)


def by_hand(training: FederatedTraining, rounds: int, alpha: float) -> tuple[Vector, Vector]:
    """Return theta and h of Acar et al. (2021), Algorithm 1; gradients of a loss are softmax(theta) - frequencies."""
    size, m = LAYOUT.vocabulary_size, len(USERS)
    theta, h = np.zeros(size), np.zeros(size)
    gradients = [np.zeros(size) for _ in USERS]  # of L_k at theta_k
    for round_ in range(rounds):
        cohort, total = training.cohort(round_).tolist(), np.zeros(size)
        for k in cohort:
            theta_k = theta.copy()
            for _ in range(STEPS * bool(USERS[k])):
                loss = softmax(theta_k) - frequencies(USERS[k])
                theta_k = theta_k - RATE * (loss - gradients[k] + alpha * (theta_k - theta))
            gradients[k] = gradients[k] - alpha * (theta_k - theta)
            total = total + theta_k
        h = h - alpha / m * (total - len(cohort) * theta)
        theta = total / len(cohort) - h / alpha
    return theta, h


@pytest.mark.parametrize(("alpha", "shards"), [(0.05, 1), (0.5, 2)])
def test_feddyn_follows_the_equations(tmp_path: Path, alpha: float, shards: int) -> None:
    """Eight rounds draw three of five users, one of whom has no records."""
    training = training_of(tmp_path, FEDDYN, {"alpha": alpha}, shards)
    *_, last = training.states(training.first_state(), 8)
    theta, h = by_hand(training, 8, alpha)
    scale = np.abs(theta).max()
    np.testing.assert_allclose(last.params["bias"].numpy(), theta, atol=1e-5 * scale)  # float32, over 72 steps
    np.testing.assert_allclose(last.moments["h"]["bias"].numpy(), h, atol=1e-5 * scale)
    assert np.abs(h).max() > 0.001 * scale


def test_an_option_changes_the_run_and_its_name(experiment: Experiment) -> None:
    """The option changes digest, label and results; options that are not set do not change the digest."""
    (experiment.folder / "feddyn.py").write_text(FEDDYN)
    plain, mine, other = (
        config.load(experiment.config, (f"training.algorithm='{experiment.folder}/feddyn.py:FedDyn'", *options))
        for options in ((), ("training.algorithm_options.alpha=0.05",), ("training.algorithm_options.alpha=0.5",))
    )
    assert len({plain.digest, mine.digest, other.digest}) == 3
    assert mine.setting == "Non-IID, FedDyn(alpha=0.05), b_u=6"
    assert plain.setting == "Non-IID, FedDyn, b_u=6"
    options = ("training.algorithm='feddyn.py:FedDyn'", "training.algorithm_options={ alpha = 0.05 }")
    flags = [part for option in options for part in ("--set", option)]
    experiment.call("run", experiment.config, "--out", "run", "--in-process", *flags)
    run = Run.open(experiment.folder / "run")
    assert run.config.digest == mine.digest
    assert verify(run).differs is None
    (copy,) = (run.path / "code").iterdir()
    copy.write_text(copy.read_text() + "raise SystemExit\n")
    assert "FedDyn(alpha=0.05)" in experiment.call("table", "run").stdout


def test_an_update_of_other_shapes_is_refused(tmp_path: Path) -> None:
    training = training_of(tmp_path, FEDDYN.replace("return update, {", "return {}, {"), {})
    with pytest.raises(RunFailed, match="FedDyn: aggregate must return tensors with the names and shapes"):
        [*training.states(training.first_state(), 1)]
