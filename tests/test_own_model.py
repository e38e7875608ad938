"""Custom networks are trained, saved and identified by their file's content; unfit ones are refused with a reason."""

import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment
from own_model import CENTRAL, SECTION, TINY_OWN, TWISTED, line_of, write_model
from populations import InMemory
from stepping import LAYOUT, batch_of, same, source
from torch import Tensor
from torch.nn.functional import cross_entropy

import flsim
from flsim.algorithms import fedavg
from flsim.algorithms.checkpoint import load, save
from flsim.algorithms.rounds import LocalEngine, engine_of
from flsim.base.errors import InputError, RunFailed
from flsim.base.files import file_digest
from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams, build, restore
from flsim.models.language_model import LogitModel, Params, TrainableModel, quantized
from flsim.privacy.ledger import PrivacyHParams
from flsim.runs import config
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.hparams import record_gradients
from flsim.training.cohort.engine import CohortEngine
from flsim.training.own_model import refuse_unfit
from flsim.training.update import LocalHParams

FORWARD = "        hidden, _"
LINE = line_of(FORWARD)
RECORDS = [[1, 2, 3, 4], [5, 6, 7], [], [8], [1, 2, 3, 9, 9, 9], [4, 5], [2]]


@pytest.fixture
def own(experiment: Experiment) -> Experiment:
    """Return `experiment` with the network of `own_model` instead of the CIFG."""
    write_model(experiment.folder)
    experiment.config.write_text(TINY_OWN + SECTION)
    return experiment


@pytest.fixture
def hparams(tmp_path: Path) -> ModelHParams:
    return ModelHParams(5, architecture=f"{write_model(tmp_path)}:TwistedGRU", options={"scale": 2.5})


def by_hand(model: TrainableModel, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Params]:
    """Return mean loss and gradient by the GRU's equations (Cho et al., 2014, in torch's form), without its modules."""
    p = {name: value.detach().double().requires_grad_() for name, value in model.trainable.items()}
    twist = dict(model.named_parameters())["twist"].double()
    state, losses = torch.zeros(len(inputs), 5, dtype=torch.float64), []
    for time in range(inputs.shape[1]):
        read = p["words.weight"][inputs[:, time]] @ twist
        r, z, n = (read @ p["cells.weight_ih_l0"].T + p["cells.bias_ih_l0"]).chunk(3, -1)
        hr, hz, hn = (state @ p["cells.weight_hh_l0"].T + p["cells.bias_hh_l0"]).chunk(3, -1)
        keep, new = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
        state = (1 - keep) * new + keep * state
        logits = 2.5 * (state @ p["words.weight"].T + p["out.bias"])
        losses.append(cross_entropy(logits, targets[:, time], ignore_index=LAYOUT.pad, reduction="sum"))
    loss = torch.stack(losses).sum() / (targets != LAYOUT.pad).sum()
    return loss.detach(), dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))


def test_trained_parameters_are_sent_and_frozen_values_have_a_digest(hparams: ModelHParams) -> None:
    """Tied parameters are sent once; a frozen parameter and a buffer are not sent, and are identified by a digest."""
    model, other = build(LAYOUT.vocabulary_size, hparams).initialize(0), build(LAYOUT.vocabulary_size, hparams)
    names = [f"cells.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    assert list(model.trainable) == ["words.weight", *names, "out.bias"]
    assert (model.vocabulary_size, model.device.type) == (LAYOUT.vocabulary_size, "cpu")
    assert not isinstance(model, LogitModel)  # attacks use no shortcut through an output layer
    copy = restore({name: value.detach() for name, value in model.trainable.items()}, hparams, LAYOUT.vocabulary_size)
    inputs, _ = batch_of(RECORDS)
    assert torch.equal(copy(inputs), model(inputs))
    assert model.frozen_digest == other.frozen_digest != ""
    with torch.no_grad():
        dict(other.named_parameters())["twist"][0, 0] += 1
    assert model.frozen_digest != other.frozen_digest
    with pytest.raises(ValueError, match="belong to another model"):
        model.load({"words.weight": torch.zeros(1)})


def test_updates_of_a_user_and_of_a_central_step_equal_the_gradient_by_hand(hparams: ModelHParams) -> None:
    model, local = build(LAYOUT.vocabulary_size, hparams), LocalHParams(batch_size=7, learning_rate=1.0)
    state = fedavg.init(LAYOUT.vocabulary_size, hparams, 0)
    loss, expected = by_hand(restore(state.params, hparams, LAYOUT.vocabulary_size), *batch_of(RECORDS))
    engine = engine_of("cohort", model, LAYOUT, local)
    assert isinstance(engine, LocalEngine)
    update = engine.train(state.params, InMemory(LAYOUT, [RECORDS]), [0], 0, 0)
    assert update.counts.loss / update.counts.tokens == pytest.approx(float(loss), rel=1e-6)
    training = CentralTraining(source(RECORDS), CentralHParams(batch_size=7, learning_rate=1.0), 0, model=hparams)
    ((central, _),) = train_central(init(LAYOUT.vocabulary_size, hparams, 0), training, 1)
    for name, gradient in expected.items():
        found = update.delta[name] / update.counts.weight
        torch.testing.assert_close(found, -gradient, rtol=1e-4, atol=1e-6, msg=name)
        step = (central.params[name] - state.params[name]).double()
        torch.testing.assert_close(step, -gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_gradients_of_single_records(hparams: ModelHParams) -> None:
    """Each record's gradient for DP-SGD equals that of `by_hand`, and training with noise resumes to the same bits."""
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0)
    inputs, targets = batch_of(RECORDS)
    gradients, _ = record_gradients(model, inputs, targets)
    assert gradients.keys() == model.trainable.keys()
    for row in range(len(RECORDS)):
        for name, expected in by_hand(model, inputs[[row]], targets[[row]])[1].items():
            torch.testing.assert_close(gradients[name][row].double(), expected, rtol=1e-4, atol=1e-6, msg=name)
    privacy = PrivacyHParams("dp", clip=0.5, noise_multiplier=0.3)
    settings = CentralHParams(batch_size=3, optimizer="adam", learning_rate=0.01, steps=6)
    training = CentralTraining(source(RECORDS), settings, 0, privacy=privacy, model=hparams)
    first = init(LAYOUT.vocabulary_size, hparams, 0)
    ((half, _), (whole, _)) = train_central(first, training, 6, lambda step: step == 2)
    ((again, _),) = train_central(half, training, 6)
    assert same(again, whole)


def test_capabilities_belong_to_the_class_that_declares_them(tmp_path: Path) -> None:
    """A subclass of the CIFG uses autograd, or, if it declares capabilities, the written-out gradient of the CIFG."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from flsim.models.architectures import CIFGLanguageModel\n"
        "class Louder(CIFGLanguageModel):\n"
        "    def logits(self, outputs):\n"
        "        return 3 * super().logits(outputs)\n"
        "class Same(CIFGLanguageModel):\n"
        "    capabilities = CIFGLanguageModel.capabilities\n"
    )
    for name, kind in (("Louder", LocalEngine), ("Same", CohortEngine)):
        model = build(LAYOUT.vocabulary_size, ModelHParams(5, 7, f"{file}:{name}"))
        assert isinstance(engine_of("cohort", model, LAYOUT, LocalHParams()), kind)
        precise = LocalHParams(precision="bf16")
        with pytest.raises(InputError, match="trains in float32") if kind is LocalEngine else nullcontext():
            engine_of("cohort", model, LAYOUT, precise)


def test_simulate_refuses_a_network_that_fails(own: Experiment) -> None:
    """The call itself raises the error, before the first round."""
    planted = flsim.plant(own.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))
    model = flsim.Model(8, architecture=f"{own.folder}/mine.py:TwistedGRU", options={"scale": 2.5})
    write_model(own.folder, (FORWARD, f"        [][0]\n{FORWARD}"))
    with pytest.raises(InputError, match=rf"mine.py:{LINE}: IndexError"):
        flsim.simulate(planted, model, flsim.FedAvg(cohort=6), rounds=2)


def test_quantization_includes_frozen_parameters_but_not_buffers(hparams: ModelHParams) -> None:
    model = build(LAYOUT.vocabulary_size, hparams).initialize(0)
    coarse = quantized(model, 2)
    assert all(len(set(value.flatten().tolist())) <= 4 for value in coarse.parameters())
    assert coarse.trainable.keys() == model.trainable.keys()
    assert torch.equal(*(dict(each.named_buffers())["scale"] for each in (model, coarse)))


TIED = "self.out.weight = self.words.weight"
BUFFER = "        self.register_buffer("
STEP = "    def step(self, state, tokens):\n        return self.start(state[0])\n\n"
CHANGES: dict[str, list[tuple[str, str]]] = {
    "mine.py:2: ModuleNotFoundError: No module named 'nothing_such'": [("import torch\n", "\nimport nothing_such\n")],
    f"mine.py:{line_of(BUFFER)}: AttributeError: 'ModelHParams' object": [("hparams.options", "hparams.choices")],
    f"mine.py:{LINE}: ValueError: not enough values to unpack": [(FORWARD, "        hidden, _, _")],
    "is not a subclass of flsim.models.language_model.": [("class TwistedGRU(TrainableModel)", "class TwistedGRU")],
    "the logits of forward differ between two calls": [("self.out(hidden)", "self.out(nn.functional.dropout(hidden))")],
    "positions of forward depend on later tokens": [("self.out(hidden)", "self.out(hidden.flip(1))")],
    "forward returns [2, 40], not logits [2, 4, 40]": [("self.out(hidden)", "self.out(hidden)[:, -1]")],
    "the loss does not depend on parameter more": [(TIED, f"{TIED}; self.more = nn.Parameter(torch.zeros(1))")],
    "differ between two constructions": [("torch.from_numpy(twist).float()", "torch.randn(size, size)")],
    "reading changes its buffers or frozen parameters": [
        (BUFFER, f'{BUFFER}"seen", torch.zeros(()))\n{BUFFER}'),
        (FORWARD, f"        self.seen += 1\n{FORWARD}"),
    ],
    "start and step give different log-probabilities": [("    def forward", f"{STEP}    def forward")],
}


@pytest.mark.parametrize(("message", "changes"), CHANGES.items(), ids=lambda value: str(value)[:20])
def test_a_network_that_is_unfit_is_refused(tmp_path: Path, message: str, changes: list[tuple[str, str]]) -> None:
    """The message is one line; `test_what_engines_cannot_do_is_refused` tests messages of the command."""
    model = ModelHParams(8, architecture=f"{write_model(tmp_path, *changes)}:TwistedGRU", options={"scale": 2.5})
    with pytest.raises(InputError, match=f"^[^\n]*{re.escape(message)}[^\n]*$"):
        refuse_unfit(model, Layout(40, 20), 0)


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        (CENTRAL, "training.precision='bf16'", 'trains in float32; training.precision "bf16" needs "cifg"'),
        (CENTRAL, "training.dropout=0.1", "training.dropout needs a NextWordModel, but "),
        (TINY_OWN, "model.options.scale=inf", "scale must be text, true, false or a finite number, found inf"),
        (TINY_OWN, "model.options={}", f"mine.py:{line_of(BUFFER)}: KeyError"),
    ],
)  # fmt: skip
def test_what_engines_cannot_do_is_refused(own: Experiment, kind: str, setting: str, message: str) -> None:
    own.config.write_text(kind + SECTION)
    refused = own.call("run", own.config, "--out", "run", "--set", setting, check=False)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
    assert message in refused.stderr


@pytest.mark.nightly
def test_an_error_in_training_names_file_and_line(own: Experiment) -> None:
    """The exit code is 1: the check before training reads at most three records at once, and a step reads four."""
    write_model(own.folder, (FORWARD, f"        if len(tokens) > 3: [][0]\n{FORWARD}"))
    failed = own.flsim("run", own.config, "--out", "run", "--set", "system.retries=0", check=False)
    (copy,) = (own.folder / "run" / "code").iterdir()
    assert failed.returncode == 1
    assert f"{copy}:{LINE}: IndexError: list index out of range" in failed.stderr.splitlines()[-1]


def test_an_error_in_evaluation_names_file_and_line(own: Experiment) -> None:
    write_model(own.folder, (FORWARD, f"        if len(tokens) > 8: [][0]\n{FORWARD}"))
    run = Run.create(config.load(own.config), own.folder / "run")
    path = run.save(replace(run.training().first_state(), round=4))
    with pytest.raises(RunFailed, match=rf"mine.*\.py:{LINE}: IndexError: list index out of range"):
        evaluate_checkpoint(run.path, path)


def test_a_changed_file_is_refused_and_changes_the_digest(own: Experiment) -> None:
    """Resuming and verifying refuse a changed file; the digest of settings depends on its content, not on its path."""
    settings = config.load(own.config)
    run = Run.create(settings, own.folder / "run")
    assert run.config.digest == settings.digest == Run.open(run.path).config.digest
    other = shutil.copytree(own.folder, own.folder.parent / "other", ignore=shutil.ignore_patterns("run"))
    assert config.load(other / "tiny.toml").digest == settings.digest
    (copy,) = (run.path / "code").iterdir()
    assert Run.reopen(settings, run.path).parameters["model.architecture"] == f"{copy.name}:TwistedGRU"
    before = settings.digest
    write_model(own.folder, ("self.scale * ", "(1 + self.scale) * "))
    refused = own.call("run", own.config, "--out", "run", "--resume", check=False)
    message = f"run: this run was started with another version of {own.folder}/mine.py, which is {copy};"
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr
    assert config.load(own.config).digest != before
    copy.write_text(TWISTED + "\n")
    with pytest.raises(InputError, match=re.escape(f"{copy}: the file changed after the run was started; restore")):
        Run.open(run.path).verify()


def test_a_checkpoint_has_digests_of_the_file_and_of_frozen_values(own: Experiment) -> None:
    run = Run.create(config.load(own.config), own.folder / "run")
    state = run.training().first_state()
    path = run.save(replace(state, round=4))
    _, provenance = load(path)
    digest = file_digest(own.folder / "mine.py")
    assert provenance.model.architecture == f"{digest}.py:TwistedGRU"
    assert provenance.model.options == {"scale": 2.5}
    assert provenance.frozen == build(40, run.config.model).frozen_digest
    assert same(run.load(path), replace(state, round=4))
    other = save(run.path / "checkpoints", replace(state, round=6), replace(run.provenance, frozen="0" * 64))
    with pytest.raises(InputError, match=r"this checkpoint has another model .* frozen 000000000000"):
        run.load(other)
