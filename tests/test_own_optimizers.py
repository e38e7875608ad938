"""Optimizers and schedules of a user's own in every engine of local and of central training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from own_optimizers import OWN
from stacking import LAYOUT, model_of, random_population, start_of
from stepping import same, training_of
from stepping import start as central_start
from training_oracle import train_cohort

from flsim.algorithms.checkpoint import Provenance, load, save
from flsim.algorithms.fedavg import train_user
from flsim.algorithms.rounds import LocalEngine, engine_of
from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.data.records import Records
from flsim.models.hparams import ModelHParams
from flsim.models.language_model import Params
from flsim.training.central import CentralHParams, train_central
from flsim.training.central.engines import engine_of as central_engine_of
from flsim.training.central.stacked_engine import StackedEngine
from flsim.training.cohort.engine import CohortEngine
from flsim.training.hparams import LocalHParams
from flsim.training.local import local_batches
from flsim.training.optimizers import refuse_failing, slots_of


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
            "stores 'steps', int, for a weight of shape (3, 2); a checkpoint holds tensors of the weight's shape",
        ),
        ("Grouped", "its steps change param_groups, which checkpoints do not store; store this in its state"),
        ("Failing", "my_optimizers.py:{line}: ArithmeticError: no way down"),
        ("no_optimizer", "returned float, not a torch.optim.Optimizer with a learning rate"),
        (
            "other_arguments",
            "cannot be created from (parameters, lr): other_arguments() got an unexpected keyword argument 'lr'",
        ),
        ("missing", "the file does not define missing; correct the name of the optimizer"),
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
