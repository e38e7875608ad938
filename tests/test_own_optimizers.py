"""Custom optimizers and schedules work in every engine of training, and custom optimizers on the server."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment
from own_optimizers import OWN
from stacking import LAYOUT, model_of, random_population, start_of
from stepping import same, training_of
from stepping import start as central_start

from flsim.algorithms import server_optimizers
from flsim.algorithms.checkpoint import Provenance, load, save
from flsim.algorithms.fedavg import train_user
from flsim.algorithms.rounds import LocalEngine, engine_of
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import InputError, RunFailed
from flsim.base.rng import stream
from flsim.data.records import Records
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.planning.plan import checkpoint_bytes
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run
from flsim.training.central import CentralHParams, train_central
from flsim.training.central.training import StackedEngine
from flsim.training.central.training import engine_of as central_engine_of
from flsim.training.cohort.engine import CohortEngine
from flsim.training.optimizers import refuse_failing, slots_of
from flsim.training.update import LocalHParams, local_batches


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my_optimizers.py"
    path.write_text(OWN)
    return path


POPULATION = random_population(5, 6, LAYOUT)


def by_loop(own: Path, name: str, engine: str = "local", micro_cohort: int | None = None) -> Params:
    """Return the summed update of all users."""
    hparams = LocalHParams(epochs=2, batch_size=4, learning_rate=0.05, optimizer=f"{own}:{name}", gradient_clip=0.5)
    model = model_of(0)
    made = engine_of(engine, model, LAYOUT, hparams, micro_cohort)  # type: ignore[arg-type]
    return made.train(start_of(model), POPULATION, range(5), 3, 0).delta


def test_a_custom_class_steps_as_in_its_paper(own: Path) -> None:
    """Lion's steps equal Algorithm 2 of Chen et al. (2023), computed here from the gradients of three batches."""
    hparams = LocalHParams(batch_size=2, learning_rate=0.01, optimizer=f"{own}:Lion")
    records = Records.from_lists([[1, 2], [3, 4, 5], [9], [7, 7], [2, 1, 3]])
    batches = list(local_batches(records, LAYOUT, hparams, stream(0, "local", 0, 0)))
    model, other = model_of(0), model_of(0)
    train_user(model, batches, hparams)
    m = {name: torch.zeros_like(value) for name, value in other.named_parameters()}
    for batch in batches:
        plain = model_of(0)
        plain.load_state_dict(other.state_dict())
        train_user(plain, [batch], LocalHParams(learning_rate=1.0))
        for (name, weight), (_, stepped) in zip(other.named_parameters(), plain.named_parameters(), strict=True):
            g = (weight - stepped).detach()  # from a step of plain SGD at learning rate 1
            weight.data.sub_(0.01 * (0.9 * m[name] + 0.1 * g).sign())
            m[name] = 0.99 * m[name] + 0.01 * g
    for (name, value), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", ["Tanh", "stacked"])
@pytest.mark.parametrize("micro_cohort", [None, 3])
def test_every_engine_takes_the_same_steps(
    own: Path, name: str, micro_cohort: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Updates in float64 agree to 1e-10. Without a `direction`, the plain engine replaces stacking and reports it."""
    reference = "made" if name == "Tanh" else name
    exact, found = by_loop(own, reference), by_loop(own, reference, "cohort", micro_cohort)
    for parameter, value in exact.items():
        torch.testing.assert_close(found[parameter], value, rtol=0, atol=1e-10)
    handed_over = "has no kernel for stacked users" in capsys.readouterr().err
    assert handed_over == (name == "Tanh" and micro_cohort == 3)


def test_the_fast_engine_is_used_if_it_supports_the_optimizer(own: Path) -> None:
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


@pytest.mark.parametrize(
    ("name", "engine"), [("made", "autograd"), ("stacked", "fused"), ("decayed", "fused"), ("adam", "autograd")]
)
def test_central_training_resumes_to_the_same_bits(own: Path, tmp_path: Path, name: str, engine: str) -> None:
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


def test_central_engines_take_the_same_steps(own: Path) -> None:
    """Engines agree to 1e-10: autograd, packed and, with a `direction`, stacked; weight decay is that of torch."""
    for name, decay in (("made", 0.0), ("stacked", 0.0), ("decayed", 0.1)):
        settings = {"optimizer": f"{own}:{name}", "learning_rate": 0.05, "weight_decay": decay}
        hparams = CentralHParams(steps=7, batch_size=4, **settings)  # type: ignore[arg-type]
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
        ("Counting", "stores 'steps', int, for a weight of shape (3, 2); a checkpoint holds tensors of the weight's"),
        ("Grouped", "its steps change param_groups, which checkpoints do not store; store this in its state"),
        ("Failing", "my_optimizers.py:{line}: ArithmeticError: no way down"),
        ("no_optimizer", "returned float, not a torch.optim.Optimizer with a learning rate"),
        ("other_arguments", "cannot be created from (parameters, lr): other_arguments() got an unexpected keyword"),
        ("missing", "the file does not define missing; correct the name of the optimizer"),
    ],
)
def test_an_unfit_optimizer_is_refused_before_training(own: Path, name: str, message: str) -> None:
    line = 1 + OWN[: OWN.index("raise ArithmeticError")].count("\n")
    hparams = CentralHParams(optimizer=f"{own}:{name}")
    with pytest.raises(InputError) as caught:
        training_of(RECORDS, hparams)
    assert message.format(line=line) in str(caught.value)
    assert "\n" not in str(caught.value)
    if name in ("Counting", "Grouped"):  # allowed on users: their optimizer is new in each round
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
    """Steps of `normalized` have length eta over both tensors, along the bias-corrected mean, computed here by hand."""
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
    trained = torch.cat([params["a"].flatten(), params["b"]]).tolist()
    assert trained == pytest.approx(x, rel=0, abs=1e-6)  # tolerance: the optimizer counts steps in float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad", "'x': names or shapes differ from those of the model's parameters"),
        ("alone", "takes 1 positional argument but 2 were given; it needs init(x, settings) and apply(x, D, moments"),
        ("forgetful", "the step changes the slots ['m', 'step'] into []; keep the same slots"),
        ("halves", "found function, not a ServerOptimizer; create one with flsim.algorithms.server_optimizers."),
    ],
)
def test_an_unfit_server_optimizer_is_refused(own: Path, name: str, message: str) -> None:
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


def test_settings_and_plans_include_a_custom_optimizer(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(experiment.folder)
    own = experiment.folder / "my_optimizers.py"
    own.write_text(OWN)

    plain, mine = (
        load_config(experiment.config, overrides)
        for overrides in ((), ("training.server_optimizer=my_optimizers.py:normalized",))
    )
    assert mine.setting == "Non-IID, FedAvg+normalized, b_u=6"
    assert mine.digest != plain.digest
    assert checkpoint_bytes(mine, 40) == 2 * checkpoint_bytes(plain, 40)  # plus a mean like the model; no step counts
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
    overrides.append("local.optimizer_options=" + text.split("`optimizer_options = ")[1].split("`")[0])
    run = Run.create(load_config(experiment.config, overrides), experiment.folder / "run")
    training = run.training()
    *_, state = training.states(training.first_state(), 3)
    assert state.round == 3
    assert state.moments.keys() == {"m"}
    assert run.setting == "Non-IID, FedAvg+normalized, b_u=6"
    assert not same(state, training.first_state())
