"""Custom networks that use random numbers in training, or whose constructor sets the initial weights."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TINY, Experiment
from populations import InMemory
from stepping import LAYOUT, same, source
from torch import nn

from flsim.algorithms import fedavg
from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining, LocalEngine
from flsim.base.errors import InputError
from flsim.base.rng import states_of_shared_generators
from flsim.models.architectures import ModelHParams, build, restore
from flsim.models.language_model import digest_of
from flsim.privacy.ledger import PrivacyHParams
from flsim.runs.folder import Run
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.own_model import refuse_unfit
from flsim.training.update import LocalHParams, UpdateSum, training_mode
from server.launch import verify

ADAPTED = '''
import random

import numpy as np
import torch
from torch import nn

from flsim.algorithms.algorithm import Algorithm, Answer
from flsim.base.rng import stream
from flsim.models.language_model import TrainableModel


class Adapted(TrainableModel):
    """A frozen table of logits in bfloat16, with a LoRA adapter (Hu et al., 2022) whose input has dropout."""

    def __init__(self, vocabulary_size, hparams):
        super().__init__(vocabulary_size, hparams)
        size, rank = vocabulary_size, 3
        table = torch.from_numpy(stream(7, "table").normal(size=(size, size)))
        self.table = nn.Parameter(table.to(torch.bfloat16), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, size))
        self.lora_b = nn.Parameter(torch.zeros(size, rank))
        self.dropout = nn.Dropout(hparams.options.get("dropout", 0.5))

    def initialize(self, seed):
        super().initialize(seed)
        nn.init.zeros_(self.lora_b)
        return self

    def forward(self, tokens):
        base = self.table[tokens].float()
        return base + self.dropout(base) @ self.lora_a.T @ self.lora_b.T


class Counting(Algorithm):
    """Federated Averaging whose users are trained by `train`."""

    def train(self, user):
        return Answer(user.train(), {})
'''
RECORDS = [[1, 2, 3, 4], [5, 6, 7], [8], [1, 2, 3, 9, 9, 9], [4, 5], [2]]
USERS = InMemory(LAYOUT, [RECORDS[:2], RECORDS[2:4], RECORDS[4:], [[3, 3], [7]], [[6]]])
LOCAL = LocalHParams(batch_size=2, epochs=3, learning_rate=0.2)
INITIALIZE = ADAPTED[ADAPTED.index("    def initialize") : ADAPTED.index("    def forward")]


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    text = ADAPTED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "adapted.py"
    file.write_text(text)
    return file


@pytest.fixture
def hparams(tmp_path: Path) -> ModelHParams:
    return ModelHParams(architecture=f"{write(tmp_path)}:Adapted")


@pytest.fixture
def own(experiment: Experiment) -> Experiment:
    """Return `experiment` with the custom network instead of the CIFG."""
    write(experiment.folder)
    section = "[model]\nembedding = 8\nunits = 12\n"
    assert section in TINY
    experiment.config.write_text(TINY.replace(section, '[model]\narchitecture = "adapted.py:Adapted"\n'))
    return experiment


def table_of(model: nn.Module) -> torch.Tensor:
    """Return the frozen logits."""
    return dict(model.named_parameters())["table"]


def federated(model: ModelHParams, algorithm: str = "fedavg", shards: int = 1) -> FederatedTraining:
    return FederatedTraining(USERS, model, FedAvgHParams(cohort=4, algorithm=algorithm), LOCAL, shards=shards)


def test_dropout_depends_only_on_seed_round_and_user(hparams: ModelHParams) -> None:
    """Dropout depends neither on what the process drew or trained before, nor on the order of the users."""
    engine = LocalEngine(build(LAYOUT.vocabulary_size, hparams), LOCAL)
    start = fedavg.init(LAYOUT.vocabulary_size, hparams, 0).params

    def update(user: int, seed: int = 0, round_: int = 0) -> UpdateSum:
        return engine.train(start, USERS, [user], seed, round_)

    together = engine.train(start, USERS, [0, 1, 3], 0, 0)
    torch.manual_seed(5)
    parts = {user: update(user) for user in (3, 1, 0)}
    alone = UpdateSum.zero(start).merge(parts[0]).merge(parts[1]).merge(parts[3])
    for name, value in together.delta.items():
        assert torch.equal(value, alone.delta[name]), name
    assert together.counts.loss == alone.counts.loss
    assert all(update(0).counts.loss != other.counts.loss for other in (update(0, seed=1), update(0, round_=1)))
    without = build(LAYOUT.vocabulary_size, replace(hparams, options={"dropout": 0.0}))
    assert LocalEngine(without, LOCAL).train(start, USERS, [0], 0, 0).counts.loss != parts[0].counts.loss


def test_a_gradient_with_dropout_is_that_of_the_drawn_mask(hparams: ModelHParams) -> None:
    """B is zeros, so its gradient is the sum over positions of the logits times A applied to the masked input."""
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0)
    tokens = torch.tensor([[LAYOUT.bos, 1, 2], [LAYOUT.bos, 4, 4]])
    with training_mode(model, 3, 1, 2):
        (found,) = torch.autograd.grad(model(tokens).square().sum() / 2, [model.trainable["lora_b"]])
    with training_mode(model, 3, 1, 2):
        base = table_of(model)[tokens].float()
        mask = nn.functional.dropout(torch.ones_like(base), 0.5)
    assert set(mask.flatten().tolist()) == {0.0, 2.0}
    low = (mask * base) @ model.trainable["lora_a"].detach().T
    torch.testing.assert_close(found, torch.einsum("btv,btr->vr", base, low))


def test_shared_generators_are_seeded_and_get_their_states_back(hparams: ModelHParams) -> None:
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0)
    before, found = states_of_shared_generators(), []
    for user in (1, 1, 2):
        with training_mode(model, 0, 0, user):
            assert model.training
            found.append((float(torch.rand(1)), random.random(), np.random.random()))
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))
    assert states_of_shared_generators() == before
    assert not model.training
    assert not restore({name: value.detach() for name, value in model.trainable.items()}, hparams, 12).training


def test_federated_states_repeat_and_resume(hparams: ModelHParams, tmp_path: Path) -> None:
    """States have the same bits, also with a custom algorithm that trains the users; two shards differ by rounding."""
    training = federated(hparams)
    first, *_, whole = training.states(training.first_state(), 4)
    torch.manual_seed(9)
    *_, resumed = federated(hparams).states(first, 4)
    assert same(resumed, whole)
    own = federated(hparams, f"{tmp_path}/adapted.py:Counting")
    assert same([*own.states(own.first_state(), 4)][-1], whole)
    *_, other = federated(hparams, shards=2).states(training.first_state(), 4)
    for name, value in whole.params.items():
        torch.testing.assert_close(other.params[name], value, rtol=1e-5, atol=1e-6)


def test_central_states_repeat_and_resume(hparams: ModelHParams) -> None:
    """Dropout is a function of (seed, step), so resumed training has the same bits; DP-SGD refuses dropout."""
    settings = CentralHParams(batch_size=2, learning_rate=0.1, steps=9)
    training = CentralTraining(source(RECORDS), settings, 0, model=hparams)
    first = init(LAYOUT.vocabulary_size, hparams, 0)
    ((half, _), (whole, _)) = train_central(first, training, 9, lambda step: step == 4)
    torch.manual_seed(9)
    ((resumed, _),) = train_central(half, training, 9)
    assert same(resumed, whole)
    ((other, _),) = train_central(first, replace(training, seed=1), 4)
    assert not same(other, half)
    private = PrivacyHParams("dp", clip=0.5, noise_multiplier=0.3)
    with pytest.raises(InputError, match="Adapted: DP-SGD does not support random numbers in training"):
        CentralTraining(source(RECORDS), settings, 0, privacy=private, model=hparams)
    CentralTraining(source(RECORDS), settings, 0, privacy=private, model=replace(hparams, options={"dropout": 0.0}))


def test_verify_repeats_a_run_with_dropout(own: Experiment) -> None:
    """Rounds are trained again to equal digests, although the shared generators have another state."""
    torch.manual_seed(1)
    assert own.call("run", own.config, "--out", "run", "--in-process").returncode == 0
    torch.manual_seed(2)
    found = verify(Run.open(own.folder / "run"))
    assert (found.differs, found.logged) == (None, found.found)


DROPS = "self.dropout(base)"
NOISE = "base * float(np.random.default_rng().uniform(0.5, 1.5))"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((DROPS, "nn.functional.dropout(base)"), "in evaluation mode; use random numbers only"),
        ((DROPS, f"({NOISE} if self.training else base)"), "in training mode with the same seeds"),
        ((DROPS, "(base * random.Random().random() if self.training else base)"), "use only torch"),
        ((DROPS, "base[:, :8]"), r"the longest record of the corpus"),
    ],
    ids=["functional", "numpy", "random", "shape"],
)  # fmt: skip
def test_faults_that_zeros_hide_are_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """The check finds faults in what the adapter reads, although B is zeros and hides them in the first logits."""
    layout = replace(LAYOUT, record_words=9)
    with pytest.raises(InputError, match=message):
        refuse_unfit(ModelHParams(architecture=f"{write(tmp_path, change)}:Adapted"), layout, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(INITIALIZE, "")], "initialize would replace lora_b, which the constructor sets to the same values"),
        (
            [(INITIALIZE, ""), ("torch.randn(rank, size)", "torch.from_numpy(stream(1, 'a').normal(size=(rank, size)))"
             ".float()")],
            "initialize would replace lora_a and 1 more, which the constructor sets",
        ),
        ([(INITIALIZE, ""), ("torch.zeros(size, rank)", "torch.randn(size, rank)")], None),
        ([(INITIALIZE, ""), ("torch.randn(rank, size)", "torch.zeros(rank, size)")], None),
    ],
    ids=["LoRA", "loaded", "random", "all zeros"],
)  # fmt: skip
def test_weights_of_the_constructor_stay(tmp_path: Path, changes: list[tuple[str, str]], message: str | None) -> None:
    model = ModelHParams(architecture=f"{write(tmp_path, *changes)}:Adapted")
    if message is None:
        refuse_unfit(model, LAYOUT, 0)
        return
    with pytest.raises(InputError, match=message):
        refuse_unfit(model, LAYOUT, 0)
    refuse_unfit(model, LAYOUT, 0, is_new=False)  # a resumed run already has its weights


def test_frozen_values_in_bfloat16_have_a_digest(hparams: ModelHParams) -> None:
    """The digest depends on every bit, and on the type: equal bits of int16, a type of numpy, have another digest."""
    one, other = (build(LAYOUT.vocabulary_size, hparams) for _ in range(2))
    assert one.frozen_digest == other.frozen_digest
    with torch.no_grad():
        table = table_of(other)
        table[2, 3] = torch.nextafter(table[2, 3], torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert one.frozen_digest != other.frozen_digest
    half = {"x": torch.ones(2, dtype=torch.bfloat16)}
    as_bits = {"x": half["x"].view(torch.int16)}
    assert digest_of(half) != digest_of(as_bits)
