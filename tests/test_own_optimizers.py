"""Optimizers and schedules of a user's own, from a file as a person writes it, in every engine and on Ray."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment, assert_same, finish, start, wait_for_round
from stacking import LAYOUT, model_of, random_population, start_of
from stepping import same, training_of
from stepping import start as central_start

from flsim.algorithms import server_optimizers
from flsim.algorithms.checkpoint import Provenance, load, save
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import InputError, RunFailed
from flsim.base.rng import stream
from flsim.data.records import Records
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.planning.disk import checkpoint_bytes
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run
from flsim.training.batches import local_batches
from flsim.training.central import CentralHParams, train_central
from flsim.training.central.engines import engine_of as central_engine_of
from flsim.training.central.stacked import StackedEngine
from flsim.training.cohort.engine import CohortEngine
from flsim.training.engines import LocalEngine, engine_of
from flsim.training.hparams import LocalHParams
from flsim.training.local import train_cohort, train_user
from flsim.training.optimizers import refuse_failing, slots_of

OWN = '''import torch

from flsim.algorithms.server_optimizers import ServerOptimizer, elementwise
from flsim.training.optimizers import Optimizer


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2, without weight decay."""

    def __init__(self, parameters, lr, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["m"] = torch.zeros_like(weight)
                weight.sub_(torch.sign(first * state["m"] + (1 - first) * weight.grad), alpha=group["lr"])
                state["m"].mul_(second).add_(weight.grad, alpha=1 - second)


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr)


def decayed(parameters, lr, weight_decay=0.0):
    return torch.optim.SGD(parameters, lr, 0.9, weight_decay=weight_decay)


def _signed(gradient, moments, _corrections, momentum):
    m = momentum * moments[0] + (1 - momentum) * gradient
    return m.tanh(), (m,)


class Tanh(torch.optim.Optimizer):
    """Steps along tanh(m), which rounding changes by no more than m."""

    def __init__(self, parameters, lr, momentum):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                m = self.state[weight].setdefault("m", torch.zeros_like(weight))
                m.mul_(group["momentum"]).add_(weight.grad, alpha=1 - group["momentum"])
                weight.sub_(m.tanh(), alpha=group["lr"])


def made(parameters, lr):
    return Tanh(parameters, lr, 0.9)


def _over(parameters, rate, momentum, _decay):
    return Tanh(parameters, rate, momentum)


stacked = Optimizer("Tanh", _over, ("m",), direction=_signed)

fedadam = elementwise(
    "Mine",
    lambda x, settings: {"m": torch.zeros_like(x), "v": torch.full_like(x, settings.server_tau**2)},
    lambda d, slots, settings: _fedadam(d, slots["m"], slots["v"], settings),
)


def _fedadam(d, m, v, settings):
    """Reddi et al. (2021), Algorithm 2, FedAdam."""
    m = settings.server_momentum * m + (1 - settings.server_momentum) * d
    v = settings.server_beta2 * v + (1 - settings.server_beta2) * d.square()
    return m / (v.sqrt() + settings.server_tau), {"m": m, "v": v}


def _init(x, settings):
    return {"m": {n: torch.zeros_like(v) for n, v in x.items()}, "step": {n: torch.zeros(()) for n in x}}


def _apply(x, d, moments, eta, settings):
    """A step of the length eta along the direction of the bias-corrected mean of updates, over all tensors."""
    beta, step = settings.server_momentum, {n: count + 1 for n, count in moments["step"].items()}
    m = {n: beta * moments["m"][n] + (1 - beta) * d[n] for n in x}
    mean = {n: m[n] / (1 - beta ** step[n]) for n in x}
    norm = sum(value.square().sum() for value in mean.values()).sqrt()
    return {n: x[n] + eta * mean[n] / (norm + 1e-12) for n in x}, {"m": m, "step": step}


normalized = ServerOptimizer("Normalized", _init, _apply)


def halves(round_, rounds):
    return 0.5**round_


class Counting(torch.optim.SGD):
    """Keeps a number, as old optimizers do."""

    @torch.no_grad()
    def step(self):
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1


class Grouped(torch.optim.SGD):
    def step(self):
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Failing(torch.optim.SGD):
    def step(self):
        raise ArithmeticError("no way down")


def no_optimizer(parameters, lr):
    return lr


def other_arguments(parameters, learning_rate):
    return torch.optim.SGD(parameters, learning_rate)


bad = ServerOptimizer("Bad", lambda x, settings: {}, lambda x, d, moments, eta, settings: (d | {"more": d}, {}))
alone = ServerOptimizer("Alone", lambda x: {}, lambda x, d: x)
forgetful = ServerOptimizer("Forgetful", _init, lambda x, d, moments, eta, settings: (x, {}))


def negative(round_, rounds):
    return -1.0
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my_optimizers.py"
    path.write_text(OWN)
    return path


POPULATION = random_population(5, 6, LAYOUT)


def by_loop(own: Path, name: str, engine: str = "local", micro_cohort: int | None = None) -> Params:
    """The summed update of all users."""
    hparams = LocalHParams(epochs=2, batch_size=4, learning_rate=0.05, optimizer=f"{own}:{name}", gradient_clip=0.5)
    model = model_of(0)
    made = engine_of(engine, model, LAYOUT, hparams, micro_cohort)  # type: ignore[arg-type]
    return made.train(start_of(model), POPULATION, range(5), 3, 0).delta


def test_a_class_of_ones_own_steps_as_its_paper_says(own: Path) -> None:
    """Chen et al. (2023), Algorithm 2, on the gradients of three batches, one number at a time."""
    hparams = LocalHParams(batch_size=2, learning_rate=0.01, optimizer=f"{own}:Lion")
    records = Records.of([[1, 2], [3, 4, 5], [9], [7, 7], [2, 1, 3]])
    batches = list(local_batches(records, LAYOUT, hparams, stream(0, "local", 0, 0)))
    model, other = model_of(0), model_of(0)
    train_user(model, batches, hparams)
    m = {name: torch.zeros_like(value) for name, value in other.named_parameters()}
    for batch in batches:
        plain = model_of(0)
        plain.load_state_dict(other.state_dict())
        train_user(plain, [batch], LocalHParams(learning_rate=1.0))
        for (name, weight), (_, stepped) in zip(other.named_parameters(), plain.named_parameters(), strict=True):
            g = (weight - stepped).detach()  # a step of plain SGD at rate 1
            weight.data.sub_(0.01 * (0.9 * m[name] + 0.1 * g).sign())
            m[name] = 0.99 * m[name] + 0.01 * g
    for (name, value), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)


def test_a_function_that_makes_torchs_own_equals_the_built_in_name_bit_for_bit(own: Path) -> None:
    model = model_of(0)
    hparams = LocalHParams(batch_size=3, learning_rate=0.01, optimizer="adam")
    built_in = train_cohort(model, POPULATION, range(5), hparams, 0, 0)
    mine = train_cohort(model, POPULATION, range(5), replace(hparams, optimizer=f"{own}:adam"), 0, 0)
    assert all(torch.equal(mine.delta[name], value) for name, value in built_in.delta.items())


@pytest.mark.parametrize("name", ["Tanh", "stacked"])
@pytest.mark.parametrize("micro_cohort", [None, 3])
def test_every_engine_steps_alike(
    own: Path, name: str, micro_cohort: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float64 to 1e-10. What has no direction is not stacked: the plain engine trains in its place, and says so."""
    reference = "made" if name == "Tanh" else name
    exact, found = by_loop(own, reference), by_loop(own, reference, "cohort", micro_cohort)
    for parameter, value in exact.items():
        torch.testing.assert_close(found[parameter], value, rtol=0, atol=1e-10)
    handed_over = "has no kernel for stacked users" in capsys.readouterr().err
    assert handed_over == (name == "Tanh" and micro_cohort == 3)


def test_engines_are_the_fast_ones_where_they_can_be(own: Path) -> None:
    model = model_of(0)

    def engine(name: str, micro_cohort: int | None, precision: str = "float32") -> object:
        hparams = LocalHParams(optimizer=f"{own}:{name}", precision=precision)  # type: ignore[arg-type]
        return engine_of("cohort", model, LAYOUT, hparams, micro_cohort)

    assert isinstance(engine("Lion", None), CohortEngine)
    assert isinstance(engine("Lion", 2), LocalEngine)
    assert isinstance(engine("stacked", 2), CohortEngine)
    model.float()
    assert isinstance(engine("stacked", None, "bf16"), CohortEngine)
    with pytest.raises(InputError, match=r'Lion" trains in float32; precision "bf16" needs an Optimizer of flsim'):
        engine("Lion", None, "bf16")


RECORDS = [[1, 2, 3], [4, 4], [6, 7, 8, 9, 1, 2], [3], [], [5, 5, 5, 5]]


@pytest.mark.parametrize("name", ["made", "stacked", "decayed", "adam"])
@pytest.mark.parametrize("engine", ["fused", "autograd"])
def test_central_training_goes_on_from_a_checkpoint_to_the_same_bits(
    own: Path, tmp_path: Path, name: str, engine: str
) -> None:
    hparams = CentralHParams(steps=7, batch_size=4, optimizer=f"{own}:{name}", learning_rate=0.05, schedule="cosine")
    training = training_of(RECORDS, hparams, engine)  # type: ignore[arg-type]
    (at_3, _), (whole, _) = train_central(central_start(), training, 7, {3}.__contains__)
    provenance = Provenance("c", "d", LAYOUT.vocabulary_size, ModelHParams(3, 5))
    read, _ = load(save(tmp_path, at_3, provenance))
    ((resumed, _),) = train_central(read, training, 7)
    assert same(resumed, whole)
    slots = {"made": {"m"}, "stacked": {"m"}, "decayed": {"momentum_buffer"}, "adam": {"exp_avg", "exp_avg_sq", "step"}}
    assert whole.moments.keys() == slots[name]
    assert set(slots_of(f"{own}:{name}")) == slots[name] - {"step"}


def test_central_engines_step_alike(own: Path) -> None:
    """Autograd, packed, and stacked where there is a direction; weight decay is torch's."""
    for name, decay in (("made", 0.0), ("stacked", 0.0), ("decayed", 0.1)):
        hparams = CentralHParams(
            steps=7, batch_size=4, optimizer=f"{own}:{name}", learning_rate=0.05, weight_decay=decay
        )
        ((exact, _),) = train_central(central_start(), training_of(RECORDS, hparams, "autograd"), 7)
        packed = training_of(RECORDS, hparams)
        ((found, _),) = train_central(central_start(), packed, 7)
        states = [found.params]
        if name == "stacked":
            engine = StackedEngine(packed, central_start())
            engine.train(engine.pack(packed.chunk(0, 7)))
            states.append(engine.params())
        for params in states:
            for parameter, value in exact.params.items():
                torch.testing.assert_close(params[parameter], value, rtol=0, atol=1e-10)
    assert not isinstance(central_engine_of(packed, central_start()), StackedEngine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Counting",
            "keeps 'steps', int, of a weight of shape (3, 2); a checkpoint holds tensors of the weight's shape",
        ),
        ("Grouped", "its steps change param_groups, which no checkpoint holds; keep that in its state"),
        ("Failing", "my_optimizers.py:{line}: ArithmeticError: no way down"),
        ("no_optimizer", "made float, not a torch.optim.Optimizer with a learning rate"),
        (
            "other_arguments",
            "cannot be made of (parameters, lr): other_arguments() got an unexpected keyword argument 'lr'",
        ),
        ("missing", "defines no missing; correct the name of the optimizer"),
    ],
)
def test_what_cannot_be_trained_with_is_refused_before_anything_is(own: Path, name: str, message: str) -> None:
    line = 1 + OWN[: OWN.index("raise ArithmeticError")].count("\n")
    hparams = CentralHParams(optimizer=f"{own}:{name}")
    with pytest.raises(InputError) as caught:
        training_of(RECORDS, hparams)
    assert message.format(line=line) in str(caught.value)
    assert "\n" not in str(caught.value)
    if name in ("Counting", "Grouped"):  # a user's optimizer is new in each round
        refuse_failing(hparams.optimizer)
    else:
        with pytest.raises(InputError):
            refuse_failing(hparams.optimizer)


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
    found = torch.cat([params["a"].flatten(), params["b"]])
    torch.testing.assert_close(found, torch.tensor(x, dtype=torch.float64), rtol=0, atol=1e-6)  # steps count in float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad", "'x' has other names or shapes than the model's parameters"),
        ("alone", "takes 1 positional argument but 2 were given; it needs init(x, settings) and apply(x, D, moments"),
        ("forgetful", "its step turns slots ['m', 'step'] into []; keep the same ones"),
        (
            "halves",
            "is function, not a ServerOptimizer; make one with flsim.algorithms.server_optimizers.ServerOptimizer",
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


def test_rows_digests_and_plans_know_ones_own(experiment: Experiment) -> None:
    own = experiment.folder / "my_optimizers.py"
    own.write_text(OWN)

    plain, mine = (
        load_config(experiment.config, overrides)
        for overrides in ((), ("training.server_optimizer=my_optimizers.py:normalized",))
    )
    assert mine.setting == "Non-IID, FedAvg+normalized, b_u=6"
    assert mine.digest != plain.digest
    assert checkpoint_bytes(mine, 40) == 2 * checkpoint_bytes(plain, 40)  # a mean like the model, and a count
    before = mine.digest
    own.write_text(OWN + "# another version\n")
    assert mine.digest != before


def test_the_document_s_optimizers_train(experiment: Experiment) -> None:
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
    assert run.setting == "Non-IID, FedAvg+normalized, b_u=6"
    first = training.first_state().params
    away = sum(float((value - first[name]).square().sum()) for name, value in state.params.items()) ** 0.5
    eta = [0.3 * (1 + math.cos(math.pi * round_ / 4)) / 2 for round_ in range(3)]
    assert 0 < away < 1.001 * sum(eta)  # three steps, each as long as the schedule says


def test_a_killed_run_resumes_to_the_same_bits_and_is_verified(experiment: Experiment) -> None:
    """On Ray, with a local optimizer, a server optimizer and schedules of one's own."""
    (experiment.folder / "my_optimizers.py").write_text(OWN)
    settings = (
        "training.rounds=12",
        "training.server_optimizer=my_optimizers.py:normalized",
        "training.server_learning_rate=0.3",
        "training.server_schedule=linear",
        "local.optimizer=my_optimizers.py:Lion",
        "local.learning_rate=0.01",
        "local.schedule=my_optimizers.py:halves",
        "evaluation.every=12",
        "system.checkpoint_every=2",
    )
    options = tuple(part for text in settings for part in ("--set", text))
    whole = experiment.run("whole", *settings)
    process = start(experiment, "--out", "broken", *options)
    wait_for_round(experiment.folder / "broken", 5)
    process.kill()
    finish(experiment, process)
    experiment.flsim("run", experiment.config, "--out", "broken", *options, "--resume")
    assert_same(experiment.folder / "broken", whole)
    logs = [(experiment.folder / run / "rounds.jsonl").read_text().splitlines() for run in ("broken", "whole")]
    assert len(logs[0]) == 12
    assert [json.loads(line)["digest"] for line in logs[0]] == [json.loads(line)["digest"] for line in logs[1]]
    experiment.call("verify", "broken", "--round", "11")
    (experiment.folder / "my_optimizers.py").write_text(OWN + "# another version\n")
    done = experiment.call("run", experiment.config, "--out", "broken", *options, "--resume", check=False)
    assert done.returncode == 2
    assert "was started with another version of" in done.stderr
    shorter = (*options, "--set", "training.rounds=6")
    (experiment.folder / "my_optimizers.py").write_text(OWN)
    done = experiment.call("run", experiment.config, "--out", "broken", *shorter, "--resume", check=False)
    assert "was started with other settings" in done.stderr  # schedules know the end
