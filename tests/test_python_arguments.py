"""Wrong arguments of the Python API: each is refused at the entry, in one line that names it."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Experiment, Trained

import flsim
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.training.optimizers import optimizer_named

MODEL = flsim.Model(3, 5)
ALGORITHM = flsim.FedAvg(cohort=5, shards=1)
OWN = r"name custom code as 'path/to/file\.py:NAME'"


class Thing:
    """An object in the place of its name."""


@pytest.fixture
def planted(experiment: Experiment) -> flsim.Planted:
    return flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))


def anything(value: object) -> Any:
    """What a notebook passes, where no type checker looks."""
    return value


def message_of(call: Callable[[], object]) -> str:
    """The message of the InputError that the call itself raises."""
    with pytest.raises(flsim.InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: flsim.Model(architecture=anything(Thing)),
            f"architecture must be a name; {OWN}, found the class Thing",
        ),
        (lambda: flsim.FedAvg(cohort=anything(10.5)), r"cohort must be an integer, found 10\.5"),
        (lambda: flsim.FedAvg(local=anything({})), r"local must be a flsim\.LocalSGD, found a dict"),
        (lambda: flsim.Privacy(anything("dpp"), clip=1.0), "mechanism must be 'none', 'clip' or 'dp', found 'dpp'"),
        (lambda: flsim.Canaries(p_u=anything(0.1)), r"p_u must be a list, such as \[0\.1\], found 0\.1"),
        (lambda: flsim.Canaries(count=anything(True)), "count must be a number, found True"),
        (lambda: flsim.Canaries(cuont=3), "cuont is not a setting"),  # type: ignore[call-arg]
        (lambda: EvaluationHParams(also=anything([Thing()])), rf"also must be a name; {OWN}, found a Thing"),
        (lambda: flsim.infer_membership("runs/x", attacks="loss"), r"attacks must be a list, such as \['loss'\]"),
        (lambda: flsim.infer_users("runs/x", device="gpu"), "device gpu: torch finds no such device; use cpu"),
        (lambda: flsim.extract_personal_data(anything(["runs/x"])), r"runs: found a list, not a path; .* \*runs"),
        (lambda: flsim.extract("runs/x", prefixes=anything(3)), r"prefixes must be a list, such as \[3\]"),
        (
            lambda: flsim.run("x.toml", "runs/x", overrides="training.rounds=3"),
            r"overrides must be a list, such as \['training\.rounds=3'\]",
        ),
    ],
)
def test_wrong_settings_are_refused_where_they_are_given(call: Callable[[], object], message: str) -> None:
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
        ({"every": 0}, "every must be at least 1, found 0"),
        ({"device": "gpu"}, "device gpu: torch finds no such device; use cpu"),
        ({"model": "cifg"}, "model must be a flsim.Model, found 'cifg'"),
        ({"algorithm": "fedavg"}, "algorithm must be a flsim.FedAvg or flsim.Central, found 'fedavg'"),
        ({"start": 3}, "start must be a state of flsim.simulate, found 3"),
    ],
)
def test_wrong_arguments_of_simulate_are_refused_before_training(
    planted: flsim.Planted, changes: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"planted": planted, "model": MODEL, "algorithm": ALGORITHM, "rounds": 2} | changes
    with pytest.raises(flsim.InputError) as caught:  # by the call itself, and not by the first state
        flsim.simulate(**arguments)
    assert str(caught.value) == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_a_device_that_is_not_there_is_refused(planted: flsim.Planted) -> None:
    expected = "device cuda: torch finds no such device; use cpu"
    assert message_of(lambda: flsim.simulate(planted, MODEL, ALGORITHM, 2, device="cuda")) == expected
    assert message_of(lambda: flsim.evaluate("x.safetensors", device="cuda")) == expected


def test_a_corpus_without_canaries_is_no_planted_one(experiment: Experiment, planted: flsim.Planted) -> None:
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


OF_RUNS = (flsim.audit, flsim.extract, flsim.infer_by_shadows, flsim.infer_membership, flsim.infer_users, flsim.reveal)


@pytest.mark.parametrize("call", [*OF_RUNS, flsim.measure_forgetting, flsim.table])
def test_a_call_without_runs_is_refused(call: Callable[[], object]) -> None:
    assert message_of(call) == "no runs: name at least one run folder or sweep folder"


def test_a_simulation_does_not_start_after_its_end(planted: flsim.Planted) -> None:
    *_, state = flsim.simulate(planted, MODEL, ALGORITHM, 2)
    message = message_of(lambda: flsim.simulate(planted, MODEL, ALGORITHM, 1, start=state))
    assert message == "start has 2 rounds, more than rounds (1); set more rounds"


def test_a_threshold_is_a_rank_and_an_attack_is_made_once(trained_here: Trained, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_here(), tmp_path / "run"))
    assert message_of(lambda: flsim.audit(run, threshold=0)) == "threshold must be at least 1, found 0"
    assert len(flsim.infer_membership(run, attacks=["blind", "blind"], records=10)) == 1


def test_a_list_is_no_optimizer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("LIST = []\n")
    with pytest.raises(flsim.InputError, match=r"must be a torch\.optim\.Optimizer, a function that returns one"):
        optimizer_named(f"{tmp_path / 'mine.py'}:LIST")
