"""Each kind of custom code receives its options as arguments, and the options are part of a run's identity."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TINY, Experiment, final_state
from populations import InMemory
from stepping import LAYOUT

import flsim
from flsim.algorithms import server_optimizers
from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.base.errors import InputError
from flsim.base.extensions import Option, by_content, configured, is_custom, options_of, parts, short_name
from flsim.models.architectures import ModelHParams, build
from flsim.privacy.conventions import conventions_of
from flsim.privacy.ledger import Entry, Ledger, PrivacyHParams, epsilon
from flsim.privacy.sampling import draw_cohort
from flsim.runs import config
from flsim.runs.folder import Run
from flsim.training.central import CentralHParams
from flsim.training.update import LocalHParams

OWN = '''
from dataclasses import dataclass

import numpy as np
import torch
from dp_accounting import PoissonSampledDpEvent

from flsim.algorithms.algorithm import Algorithm
from flsim.algorithms.server_optimizers import ServerOptimizer
from flsim.base.rng import stream
from flsim.models.language_model import TrainableModel
from flsim.privacy.sampling import Sampler


class Named(Algorithm):
    label = "Named algorithm"

    def __init__(self, mode="slow", level=1):
        if mode not in ("slow", "fast"):
            raise ValueError(f"no mode {mode}")
        self.mode = mode


@dataclass(frozen=True)
class Sparse(Sampler):
    """Poisson sampling at a part of the rate."""

    label = "sparse"
    part: float = 1.0

    def draw(self, seed, round_, population):
        drawn = stream(seed, "sparse", round_).random(population)
        return np.flatnonzero(drawn < self.part * self.cohort / population)

    def sizes(self, population):
        return 0, population

    def event(self, population, mechanism):
        return PoissonSampledDpEvent(self.part * self.cohort / population, mechanism)


def scaled(factor=1.0):
    def apply(x, update, moments, eta, settings):
        return {name: value + factor * eta * update[name] for name, value in x.items()}, {}

    return ServerOptimizer("Scaled", lambda x, settings: {}, apply)

plain = ServerOptimizer("Plain", lambda x, settings: {}, lambda x, update, moments, eta, settings: (x, {}))


def descent(parameters, lr, times=1.0):
    return torch.optim.SGD(parameters, lr * times)


def falling(at, total, floor=0.0):
    return max(floor, 1 - at / total)


class Table(TrainableModel):
    def __init__(self, vocabulary_size, hparams):
        super().__init__(vocabulary_size, hparams)
        assert hparams.options["kind"] == "table"
        self.table = torch.nn.Parameter(torch.zeros(vocabulary_size, vocabulary_size))

    def forward(self, tokens):
        return self.table[tokens]
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_name_carries_its_options() -> None:
    """A name includes its options, which can be read back, even text that contains the syntax of names and options."""
    options: dict[str, Option] = {"text": 'a.py:b{"c": 1}', "share": 0.1, "times": 3, "fast": True}
    settings = FedAvgHParams(sampler="folder/own.py:Sparse", sampler_options=options)
    name = configured(settings, "sampler")
    assert (is_custom(name), parts(name)) == (True, (Path("folder/own.py"), "Sparse"))
    assert options_of(name) == options
    assert short_name('own.py:Sparse{"part": 0.5}') == "Sparse(part=0.5)"
    assert configured(FedAvgHParams(), "sampler") == "fixed-size"
    assert not any(map(is_custom, ('own.py:Sparse{"part": 0.5', "own.py:Sparse{part}", "own.py:Sparse[]")))


def test_a_sampler_and_its_epsilon(own: str) -> None:
    """Half the rate draws half the users, at the epsilon of Poisson sampling of half; names by content keep options."""
    name = configured(FedAvgHParams(sampler=f"{own}:Sparse", sampler_options={"part": 0.5}), "sampler")
    entry = Entry(by_content(name), 1000, 100, 1.0, 20)
    ledger = Ledger.from_json(Ledger((entry,)).to_json())
    half = Ledger((Entry("poisson", 1000, 50, 1.0, 20),))
    rdp, _ = conventions_of(entry.sampler)
    (poisson,) = [one for one in conventions_of("poisson") if one.name == "poisson-rdp"]
    assert epsilon(ledger, 1e-5, rdp) == epsilon(half, 1e-5, poisson)
    sizes = [len(draw_cohort(0, round_, 1000, 100, name)) for round_ in range(50)]
    assert abs(np.mean(sizes) - 50) < 4 * np.sqrt(50 / 50)  # four standard errors, for the mean of 50 rounds


def test_a_server_optimizer_and_its_schedule(own: str) -> None:
    """A function takes the options and returns the server optimizer; a `ServerOptimizer` itself takes no options."""
    falling = {"server_schedule": f"{own}:falling", "server_schedule_options": {"floor": 0.8}}
    settings = ServerOptimizerHParams(f"{own}:scaled", server_optimizer_options={"factor": 0.25}, **falling)  # type: ignore[arg-type]
    x, update = {"w": torch.zeros(3)}, {"w": torch.ones(3, dtype=torch.float64)}
    stepped, _ = server_optimizers.apply(x, update, {}, settings, settings.server_rate(1, 2))
    assert torch.equal(stepped["w"], torch.full((3,), 0.25 * 0.8))
    assert settings.server_label == "scaled(factor=0.25)"
    assert ServerOptimizerHParams(f"{own}:scaled").server_label == "scaled"
    wrong = ServerOptimizerHParams(f"{own}:plain", server_optimizer_options={"factor": 1})
    with pytest.raises(InputError, match="plain: takes no options; name a function that takes options"):
        server_optimizers.init(x, wrong)


def test_local_and_central_optimizers_and_schedules(own: str) -> None:
    options = {"optimizer": f"{own}:descent", "optimizer_options": {"times": 3.0}}
    schedule = {"schedule": f"{own}:falling", "schedule_options": {"floor": 0.5}}
    for kind in (LocalHParams, CentralHParams):
        hparams = kind(learning_rate=0.1, **options, **schedule)  # type: ignore[arg-type]
        assert hparams.rate(9, 10) == 0.05
        assert hparams.optimizer_over([torch.zeros(2)]).param_groups[0]["lr"] == pytest.approx(0.3)
    with pytest.raises(InputError, match=r"descent.*cannot be created from .*unexpected keyword argument 'tims'"):
        LocalHParams(optimizer=f"{own}:descent", optimizer_options={"tims": 1}).optimizer_over([torch.zeros(2)])


def test_options_of_a_model_may_be_text(own: str) -> None:
    hparams = ModelHParams(architecture=f"{own}:Table", options={"kind": "table"})
    assert build(12, hparams).trainable["table"].shape == (12, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm_options": {"alpha": 1.0}}, 'algorithm_options: options are for custom code only, found "fedavg"'),
        ({"sampler": "own.py:A", "sampler_options": {"a": math.nan}}, "sampler_options: a must be text, true, false"),
        ({"sampler": "own.py:A", "sampler_options": {"a b": 1}}, "'a b' is not a valid name of an argument"),
        ({"sampler": 'own.py:A{"a": 1}'}, r"write the options of A\(a=1\) in sampler_options"),
    ],
)
def test_invalid_options_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedAvgHParams(**settings)  # type: ignore[arg-type]


def test_a_run_with_options_of_every_kind(experiment: Experiment) -> None:
    """The run folder keeps the options of the TOML file, and the Python API trains the same parameters with them."""
    (experiment.folder / "own.py").write_text(OWN)
    tables = """
algorithm = "own.py:Named"
algorithm_options = { mode = "fast", level = 2 }
sampler = "own.py:Sparse"
sampler_options = { part = 0.9 }
server_optimizer = "own.py:scaled"
server_optimizer_options = { factor = 0.5 }
"""
    local = '[local]\noptimizer = "own.py:descent"\noptimizer_options = { times = 2.0 }\n'
    experiment.config.write_text(TINY.replace("cohort = 6\n", f"cohort = 6\n{tables}").replace("[local]\n", local))
    experiment.call("run", experiment.config, "--out", "run", "--in-process")
    run = Run.open(experiment.folder / "run")
    assert run.setting == "Non-IID, Named(level=2, mode=fast)+scaled(factor=0.5), b_u=6, Sparse(part=0.9)"
    assert run.config.digest == config.load(experiment.config).digest
    file = f"{experiment.folder}/own.py"
    planted = flsim.plant(experiment.folder / "corpus", run.config.canaries, seed=run.config.seed)
    algorithm = flsim.FedAvg(
        cohort=6,
        algorithm=f"{file}:Named",
        algorithm_options={"mode": "fast", "level": 2},
        sampler=f"{file}:Sparse",
        sampler_options={"part": 0.9},
        server=flsim.ServerOptimizer(f"{file}:scaled", server_optimizer_options={"factor": 0.5}),
        local=flsim.LocalSGD(batch_size=4, optimizer=f"{file}:descent", optimizer_options={"times": 2.0}),
        shards=1,
    )
    *_, state = flsim.simulate(planted, flsim.Model(8, 12), algorithm, 4, seed=run.config.seed)
    for name, value in final_state(run.path).params.items():
        assert torch.equal(value, state.params[name]), name


def test_the_ledger_of_dp_training_has_the_options_of_its_sampler(own: str) -> None:
    users = InMemory(LAYOUT, [[[1, 2, 3]]] * 20)
    private = PrivacyHParams("dp", clip=1.0, noise_multiplier=1.0)
    server = FedAvgHParams(cohort=4, sampler=f"{own}:Sparse", sampler_options={"part": 0.5})
    training = FederatedTraining(users, ModelHParams(3, 5), server, privacy=private)
    *_, state = training.states(training.first_state(), 2)
    assert [options_of(entry.sampler) for entry in state.ledger.entries] == [{"part": 0.5}]
