"""`flsim run` of central training equals its steps in this process; also refusals, signals and `flsim verify`."""

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from faulty import SETTINGS
from helpers import CENTRAL, Experiment, Flsim, Trained, assert_table_says_diverged, final_state, rows
from stepping import same
from waiting import wait_until

from flsim.algorithms.micro_cohorts import FILE
from flsim.base.errors import InputError, Interrupted
from flsim.privacy.conventions import CONVENTIONS
from flsim.privacy.ledger import epsilon
from flsim.runs import config
from flsim.runs.config import load
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.training import central
from flsim.training.central import CentralTraining, train_central
from flsim.training.central.hparams import Order
from flsim.training.update import State
from server.central import train
from server.stopping import no_signal_lost

RECORDS = 24 * 8
NOISE = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=0.8")
PRIVATE = (*NOISE, "training.optimizer=rmsprop", "system.physical_batch=3")
LONG = ("training.steps=1000000", "evaluation.every=1000000")


def log_of(run: Path) -> list[dict[str, object]]:
    """Return the lines of a log without their times."""
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def train_in_this_process(run: Run) -> State:
    """Train 40 steps without interruption: in random order (IID data or DP), otherwise in sequence through users."""
    settings, privacy = run.central, run.config.privacy
    order: Order = "iid" if settings.data.partition == "iid" or privacy.mechanism != "none" else "sequence"
    lots = settings.system.physical_batch
    known = (run.users, settings.training, settings.seed, order, privacy)
    training = CentralTraining(*known, physical_batch=lots, model=settings.model)
    state = central.init(run.corpus.layout.vocabulary_size, settings.model, settings.seed)
    ((state, _),) = train_central(state, training, 40)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (("data.partition=iid",), "IID, Adam, b_r=9"),
        pytest.param(PRIVATE, "DP-RMSProp, C=0.5, z=0.8, b_r=9", marks=pytest.mark.nightly),
    ],
    ids=["iid", "private"],
)
def test_a_run_equals_its_steps_in_this_process(
    central_experiment: Experiment, trained: Trained, flsim: Flsim, overrides: tuple[str, ...], setting: str
) -> None:
    path = shutil.copytree(trained(*overrides), central_experiment.folder / "run")
    assert same(final_state(path), train_in_this_process(Run.open(path)))
    assert [line["round"] for line in log_of(path)] == [7, 14, 20, 21, 28, 35, 40]
    kept = [f"round-{step:06d}" for step in (20, 35, 40)]
    assert sorted(file.stem for file in (path / "checkpoints").iterdir()) == kept
    stored = rows(path)
    assert sorted(stored["round"].unique()) == [20, 40]
    evaluate_checkpoint(path, path / "checkpoints" / "round-000040.safetensors")
    assert rows(path).equals(stored)
    about = json.loads((path / "run.json").read_text())
    assert (about["status"], about["round"], about["rounds"], about["setting"]) == ("completed", 40, 40, setting)
    assert about["label"] == setting.removeprefix("IID, ")
    privacy = {metric for metric in stored["metric"] if "epsilon" in metric or "delta" in metric}
    table = flsim("table", path)[1]
    assert setting in table
    if overrides is not PRIVATE:
        assert [line["records"] for line in log_of(path)] == [63, 63, 54, 9, 57, 63, 45]  # step 22 reads 3
        assert not privacy
        assert "eps." not in table
        return
    by_name = {convention.name: convention for convention in CONVENTIONS}
    spent = epsilon(final_state(path).ledger, 1 / (10 * RECORDS), by_name["poisson-rdp"])
    assert privacy == {"record epsilon poisson-rdp", "record delta"}  # no metric looks like a user's epsilon
    at_the_end = stored[stored["round"] == 40].set_index("metric")["value"]
    assert at_the_end["record epsilon poisson-rdp"] == spent
    assert at_the_end["record delta"] == 1 / (10 * RECORDS)
    assert log_of(path)[-1]["record_epsilon"] == {"poisson-rdp": spent}
    assert re.search(rf"\| *{spent:.3g} *\|", table)
    assert "Rec. eps.: epsilon of one record, not of a user, by poisson-rdp" in table
    assert flsim("privacy", path)[1].startswith("Record-level: epsilon protects one record, not its author.")
    assert {line["unit"] for line in json.loads(flsim("privacy", path, "--json")[1])} == {"record"}


def wait_for_step(run: Path, step: int) -> None:
    log = run / "rounds.jsonl"
    wait_until(lambda: log.exists() and f'"round": {step},' in log.read_text())


def settings(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


@pytest.mark.slow
def test_a_diverging_run_stops_with_the_step_and_the_last_good_checkpoint(central_experiment: Experiment) -> None:
    options = settings("training.learning_rate=1e4", "training.optimizer=sgd", "system.checkpoint_every=1")
    failed = central_experiment.flsim("run", central_experiment.config, "--out", "run", *options, check=False)
    assert failed.returncode == 1
    line = failed.stderr.strip().splitlines()[-1]
    assert line.startswith("flsim: step ")
    assert "most likely learning_rate is too high; last good checkpoint: " in line
    about = json.loads((central_experiment.folder / "run" / "run.json").read_text())
    assert about["status"] == "diverged"
    assert_table_says_diverged(central_experiment, about["reason"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*PRIVATE, "training.batch_size=193"), "batch_size must be between 1 and the 192 training records, found 193"),
        (("training.precision=tf32",), 'training.precision "tf32" needs an NVIDIA GPU'),
        (("training.cohort=4", "training.rounds=3"), "training.cohort, training.rounds: of federated training, but"),
        (("system.gpus=0.5",), 'gpus is for device "cuda"'),
    ],
)
def test_bad_settings_leave_no_run(
    central_experiment: Experiment, flsim: Flsim, overrides: tuple[str, ...], message: str
) -> None:
    new = central_experiment.folder / "new"
    code, out, err = flsim("run", central_experiment.config, "--out", new, *settings(*overrides))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not new.exists()


@pytest.fixture
def make_run(central_experiment: Experiment) -> Callable[..., Run]:
    def make(*overrides: str) -> Run:
        return Run.create(config.load(central_experiment.config, overrides), central_experiment.folder / "made")

    return make


def test_a_central_run_has_no_clients_and_its_population_is_its_records(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with pytest.raises(InputError, match="training is central, which has no clients"):
        _ = run.federated
    assert (run.rounds, run.population, math.isclose(run.delta, 1 / 1_920)) == (40, RECORDS, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_a_node_without_the_gpu_that_ray_counts_is_refused(make_run: Callable[..., Run]) -> None:
    with pytest.raises(InputError, match=r'system\.device is "cuda", but torch finds no GPU on the node'):
        next(train(make_run("system.device=cuda").path, gpus=1.0))


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield a signal whose handler raises SystemExit, like the handler of the command line."""

    def handle(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(request.param, handle)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_whose_exception_is_caught_interrupts_after_the_block(number: int) -> None:
    went_on = list[bool]()

    def catch_and_go_on() -> None:
        with suppress(SystemExit):
            os.kill(os.getpid(), number)
        went_on.append(True)

    with pytest.raises(Interrupted) as raised, no_signal_lost():
        catch_and_go_on()
    assert (raised.value.signal, went_on) == (number, [True])


def test_an_exception_that_nobody_catches_ends_the_block(number: int) -> None:
    with pytest.raises(SystemExit) as raised, no_signal_lost():
        os.kill(os.getpid(), number)
    assert raised.value.code == 128 + number


def test_signal_handlers_are_restored(number: int) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with no_signal_lost():
        pass
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.slow
def test_verify_repeats_any_round_of_a_private_run(copy_of_trained: Trained, flsim: Flsim) -> None:
    run = copy_of_trained(*SETTINGS)
    # The run keeps checkpoints of the evaluated rounds 10, 20 and 30, and of round 25, the last before the end.
    for round_, start in ((1, 0), (10, 0), (27, 25), (30, 25)):
        said = flsim("verify", run, "--round", str(round_))[1]
        assert re.fullmatch(rf"round {round_}: trained again from round {start}, equal, digest \w+\n", said), said
    assert flsim("verify", run)[1].startswith("round 30: trained again from round 25, equal, digest ")
    (found,) = flsim("verify", run, "--round", "8", "--json")[1].splitlines()
    assert json.loads(found)["differs"] is None

    _change_digest(run, 22)
    code, _, said = flsim("verify", run, "--round", "24")
    assert code == 1
    assert "trained again from round 20, round 22 differs: logged 0000" in said
    code, _, said = flsim("verify", run, "--round", "31")
    assert code == 2
    assert "cannot verify round 31; it logged 1 to 30" in said


@pytest.mark.nightly
def test_verify_repeats_rounds_of_stacked_users(experiment: Experiment, flsim: Flsim) -> None:
    """`flsim verify` repeats rounds; from round 2, a shard stacks fewer users, as a run records if memory runs out."""
    run = Run.create(load(experiment.config, ["system.micro_cohort=4", "system.shards=2"]), experiment.folder / "run")
    (run.path / FILE).write_text('{"users": 1, "shard": 1, "round": 1}\n')
    experiment.run("run", "system.micro_cohort=4", "system.shards=2", options=["--resume"])
    assert (run.path / FILE).read_text().count("\n") == 1
    for round_ in (1, 2, 4):
        assert "equal" in flsim("verify", run.path, "--round", str(round_), "--device", "cpu")[1]


@pytest.mark.slow
def test_verify_repeats_steps_of_central_training(experiment: Experiment, trained: Trained, flsim: Flsim) -> None:
    experiment.config.write_text(CENTRAL)
    run = shutil.copytree(trained("data.partition=iid"), experiment.folder / "run")
    said = flsim("verify", run, "--round", "35")[1]
    assert said.startswith("round 35: trained again from round 20, equal")
    _change_digest(run, 35)
    code, _, said = flsim("verify", run, "--round", "35")
    assert code == 1
    assert "trained again from round 20, round 35 differs: logged 0000" in said


def _change_digest(run: Path, round_: int) -> None:
    log = run / "rounds.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["round"] == round_:
            line["digest"] = "0" * 64
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
