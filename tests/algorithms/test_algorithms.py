"""Tests of SCAFFOLD and FedProx against their papers' equations, users' states, custom algorithms, and killed runs."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import Experiment, assert_same, killed_and_whole
from hypothesis import given, settings
from one_vector import ONE_VECTOR, USERS, Vector, frequencies, softmax
from populations import InMemory
from stepping import LAYOUT

from flsim.algorithms import server_optimizers
from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.server_optimizers import ServerOptimizerHParams
from flsim.algorithms.summation import RoundRequest, ShardReply
from flsim.algorithms.user_states import UserStates
from flsim.base.errors import InputError, RunFailed
from flsim.base.rng import stream
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy.ledger import PrivacyHParams
from flsim.runs.folder import Run
from flsim.training.update import LocalHParams
from server.launch import verify

ROOT = Path(__file__).parents[2]
OWN = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "algorithms.md").read_text(), re.MULTILINE | re.DOTALL)[0]


@pytest.fixture
def bias(tmp_path: Path) -> ModelHParams:
    (tmp_path / "bias.py").write_text(ONE_VECTOR)
    return ModelHParams(1, 1, f"{tmp_path}/bias.py:Bias")


def training_of(model: ModelHParams, algorithm: str, local: LocalHParams, **others: object) -> FederatedTraining:
    server = FedAvgHParams(algorithm=algorithm, cohort=3, server_learning_rate=0.5)
    return FederatedTraining(InMemory(LAYOUT, USERS), model, server, local, **others)  # type: ignore[arg-type]


def scaffold_by_hand(training: FederatedTraining, rounds: int, steps: int, rate: float) -> tuple[Vector, Vector]:
    """Return x and c of Karimireddy et al. (2020), Algorithm 1, option II; gradients are softmax(y) - frequencies."""
    size, n = LAYOUT.vocabulary_size, len(USERS)
    x, c = np.zeros(size), np.zeros(size)
    controls = [np.zeros(size) for _ in USERS]
    for round_ in range(rounds):
        cohort = training.cohort(round_)
        of_model, of_control = np.zeros(size), np.zeros(size)
        for i in cohort.tolist():
            if not USERS[i]:
                continue
            y = x.copy()
            for _ in range(steps):
                y = y - rate * (softmax(y) - frequencies(USERS[i]) - controls[i] + c)
            after = controls[i] - c + (x - y) / (steps * rate)
            of_model, of_control = of_model + (y - x), of_control + (after - controls[i])
            controls[i] = after
        x = x + 0.5 * of_model / len(cohort)
        c = c + len(cohort) / n * (of_control / len(cohort))
    return x, c


@pytest.mark.parametrize("shards", [1, 2])
def test_scaffold_follows_the_equations(bias: ModelHParams, shards: int) -> None:
    """Six rounds draw three of five users, one of whom has no records; a user makes two steps over all records."""
    local = LocalHParams(epochs=2, batch_size=10, learning_rate=0.7)
    training = training_of(bias, "scaffold", local, shards=shards)
    *_, last = training.states(training.first_state(), 6)
    x, c = scaffold_by_hand(training, 6, steps=2, rate=0.7)
    np.testing.assert_allclose(last.params["bias"].numpy(), x, atol=2e-6)
    np.testing.assert_allclose(last.moments["control"]["bias"].numpy(), c, atol=2e-6)
    assert np.abs(c).max() > 0.01


def test_a_round_at_a_learning_rate_of_zero_changes_no_control_variate(bias: ModelHParams, tmp_path: Path) -> None:
    """A custom schedule pauses in the third round; the rounds after the pause continue from finite numbers."""
    (tmp_path / "own.py").write_text("def paused(round_, total):\n    return float(round_ != 2)\n")
    local = LocalHParams(epochs=2, batch_size=10, learning_rate=0.7, schedule=f"{tmp_path}/own.py:paused")
    training = training_of(bias, "scaffold", local, length=6)
    states = [*training.states(training.first_state(), 6)]
    before, paused = states[1], states[2]
    for one, other in ((before.params, paused.params), (before.moments["control"], paused.moments["control"])):
        assert torch.equal(one["bias"], other["bias"])
    assert states[-1].moments["control"]["bias"].isfinite().all()
    assert not torch.equal(states[-1].params["bias"], paused.params["bias"])


def test_repeated_rounds_do_not_read_states_that_they_wrote_before(bias: ModelHParams, tmp_path: Path) -> None:
    """Users keep the states that round 3 may need, so training that repeats from there after a fault has equal bits."""
    local = LocalHParams(batch_size=2, learning_rate=0.7)
    training = training_of(bias, "scaffold", local, user_states=UserStates(tmp_path))
    engine = training.engine_here()

    def send(asked: Sequence[RoundRequest]) -> list[ShardReply]:
        return [ShardReply(each.round, each.shard, training.update(engine, each)) for each in asked]

    first = [round_.state for round_ in training.rounds(training.first_state(), 8, send)]
    again = [round_.state for round_ in training.rounds(first[2], 8, send)]
    for one, other in zip(first[3:], again, strict=True):
        assert torch.equal(one.params["bias"], other.params["bias"])
        assert torch.equal(one.moments["control"]["bias"], other.moments["control"]["bias"])
    forgetful = training_of(bias, "scaffold", local)
    *_, other = forgetful.states(first[2], 8)
    assert not torch.equal(other.params["bias"], first[7].params["bias"])  # its users have no states


def test_fedprox_equals_federated_averaging_with_the_proximal_term(bias: ModelHParams) -> None:
    """The term has gradient 0 in the first step, and mu (w - w_global) in the second: Li et al. (2020), equation 2."""
    local = LocalHParams(epochs=2, batch_size=10, learning_rate=0.7, proximal=0.9)
    training = training_of(bias, "fedprox", local)
    (last,) = training.states(training.first_state(), 1)
    moved, examples = np.zeros(LAYOUT.vocabulary_size), 0
    for i in training.cohort(0).tolist():
        y = np.zeros(LAYOUT.vocabulary_size)
        for _ in range(2 * bool(USERS[i])):
            y = y - 0.7 * (softmax(y) - frequencies(USERS[i]) + 0.9 * y)
        moved, examples = moved + len(USERS[i]) * y, examples + len(USERS[i])
    np.testing.assert_allclose(last.params["bias"].numpy(), 0.5 * moved / examples, atol=1e-6)
    with pytest.raises(InputError, match=r"needs mu; set local\.proximal"):
        training_of(bias, "fedprox", replace(local, proximal=0.0))


def test_unsupported_settings_and_wrong_algorithms_are_refused(bias: ModelHParams, tmp_path: Path) -> None:
    for mechanism in (PrivacyHParams("clip", clip=0.1), PrivacyHParams("dp", clip=0.1, noise_multiplier=1.0)):
        with pytest.raises(InputError, match="sends more than a clipped update"):
            training_of(bias, "scaffold", LocalHParams(), privacy=mechanism)
    plain = LocalHParams()
    others = {
        "optimizer": replace(plain, optimizer="momentum"),
        "gradient_clip": replace(plain, gradient_clip=1.0),
        "proximal": replace(plain, proximal=0.1),
    }
    for name, local in others.items():
        with pytest.raises(InputError, match=rf"remove local\.{name}"):
            training_of(bias, "scaffold", local)
    with pytest.raises(InputError, match="must be one of fedavg, fedprox, scaffold, flexlora, found 'sacffold'"):
        FedAvgHParams(algorithm="sacffold")
    (tmp_path / "no.py").write_text("nothing = 3\n")
    with pytest.raises(InputError, match=r"not a subclass of flsim\.algorithms\.algorithm\.Algorithm"):
        training_of(bias, f"{tmp_path}/no.py:nothing", LocalHParams())
    (tmp_path / "odd.py").write_text(OWN.replace("{}, {", '{"more": delta}, {'))
    odd = training_of(bias, f"{tmp_path}/odd.py:Counting", LocalHParams())
    with pytest.raises(RunFailed, match="a user must answer with a tensor for each parameter of no slot"):
        list(odd.states(odd.first_state(), 1))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12), st.integers(0, 12))
def test_users_read_their_last_state_before_any_repeatable_round(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int]], goes_back: int
) -> None:
    """This holds in files, in memory, and in memory over files, for writes in any rounds, and after going back."""
    folder = tmp_path_factory.mktemp("users")
    on_disk, in_memory = UserStates(folder), UserStates()
    written: dict[int, dict[int, float]] = {}

    def value_of(states: UserStates, user: int, round_: int) -> float | None:
        kept = states.read(user, round_)
        return None if kept is None else float(kept["a"]["w"])

    def write(round_: int) -> None:
        user, lag = parts[round_]
        for states in (on_disk, in_memory):
            states.write(user, round_, {"a": {"w": torch.tensor(float(round_))}}, max(0, round_ - lag))
        assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.rglob("*.safetensors"))  # others can read
        written.setdefault(user, {})[round_] = float(round_)

    oldest = 0
    for round_, (_, lag) in enumerate(parts):
        write(round_)
        oldest = max(oldest, round_ - lag)
    back = min(max(goes_back, oldest), len(parts))
    for round_ in range(back, len(parts)):  # trained again
        write(round_)
    for user in range(3):
        for round_ in range(back, len(parts) + 1):
            before = [kept for kept in written.get(user, {}) if kept < round_]
            expected = float(max(before)) if before else None
            for states in (on_disk, in_memory, UserStates(folder, is_read_only=True)):
                assert value_of(states, user, round_) == expected
    over = UserStates(folder, is_read_only=True)
    files = sorted(folder.rglob("*"))
    over.write(0, len(parts), {"a": {"w": torch.tensor(0.5)}}, 0)
    assert value_of(over, 0, len(parts) + 1) == 0.5
    assert sorted(folder.rglob("*")) == files


def test_reading_removed_or_damaged_states_is_refused(tmp_path: Path) -> None:
    states = UserStates(tmp_path)
    for round_ in (1, 4, 6):
        states.write(7, round_, {"a": {"w": torch.zeros(1)}}, oldest_resumable_round=6)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    with pytest.raises(InputError, match="the state of user 7 before round 4 was removed"):
        states.read(7, 3)
    (path,) = tmp_path.rglob("round-000006*")
    path.write_bytes(b"?")
    with pytest.raises(InputError, match="damaged"):
        states.read(7, 9)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "label"),
    [
        (("training.algorithm=scaffold",), "SCAFFOLD, b_u=6"),
        (("training.algorithm=mine.py:Counting",), "Counting, b_u=6"),
        (("training.sampler=with-replacement", "training.cohort=20"), "b_u=20, with replacement"),
        (
            ("training.sampler=fedbuff", "training.sampler_options={concurrency=8}", "local.max_records=5"),
            "b_u=6, FedBuff(concurrency=8)",
        ),
    ],
)
def test_runs_are_killed_and_resume_to_the_same_bits(
    experiment: Experiment, settings: tuple[str, ...], label: str
) -> None:
    """Runs have two client processes and shards; a round is verified, a table has the label, users have few files."""
    (experiment.folder / "mine.py").write_text(OWN)
    killed, whole = killed_and_whole(experiment, "training.rounds=12", "system.shards=2", *settings, workers=2)
    assert_same(killed, whole)
    run = Run.open(whole)
    assert verify(run, 12).differs is None
    assert label in experiment.flsim("table", whole).stdout
    if "sampler" in settings[0]:
        experiment.flsim("trace", whole)
        return
    training = run.federated.training_of(run.users, run.rounds)
    sampled = {int(user) for round_ in range(12) for user in training.cohort(round_)}
    for path in (killed, whole):
        assert {int(user.name) for user in (path / "users").glob("*/*")} == sampled
        assert max(len(list(user.iterdir())) for user in (path / "users").glob("*/*")) <= 4


STEPS = 12


def start() -> Params:
    rng = stream(0, "start")
    return {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in (("a", (3, 2)), ("b", (5,)))}


def updates() -> list[Params]:
    """Return updates of different sizes, one of them zero, as from clipping and from a round without users."""
    rng = stream(0, "updates")
    sizes = [1.0, 0.0, *rng.uniform(0.001, 2.0, STEPS - 2)]
    return [
        {name: torch.from_numpy(size * rng.normal(size=value.shape)) for name, value in start().items()}
        for size in sizes
    ]


def trained(hparams: ServerOptimizerHParams) -> Params:
    params, moments = start(), server_optimizers.init(start(), hparams)
    for update in updates():
        params, moments = server_optimizers.apply(params, update, moments, hparams)
    return params


def by_torch(make: type[torch.optim.Optimizer], **settings: Any) -> Params:
    """Return what torch's optimizer gives. It minimizes; therefore, the gradient is the negative update."""
    params = {name: value.requires_grad_() for name, value in start().items()}
    optimizer = make(list(params.values()), **settings)
    for update in updates():
        for name, value in params.items():
            value.grad = -update[name]
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


def by_hand(kind: str, eta: float, beta1: float, beta2: float, tau: float) -> Params:
    """Return the result of Reddi et al. (2021), Algorithm 2, on one number at a time."""
    result = {}
    for name, value in start().items():
        numbers = []
        for index, x in enumerate(value.flatten().tolist()):
            m, v = 0.0, tau**2
            for update in updates():
                delta = update[name].flatten()[index].item()
                m = beta1 * m + (1 - beta1) * delta
                if kind == "adagrad":
                    v = v + delta**2
                elif kind == "yogi":
                    sign = (v > delta**2) - (v < delta**2)
                    v = v - (1 - beta2) * delta**2 * sign
                else:
                    v = beta2 * v + (1 - beta2) * delta**2
                x = x + eta * m / (math.sqrt(v) + tau)
            numbers.append(x)
        result[name] = torch.tensor(numbers, dtype=torch.float64).reshape(value.shape)
    return result


def assert_close(mine: Params, other: Params) -> None:
    for name, value in other.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-12)


def test_sgd_equals_torch_and_adds_the_update_at_learning_rate_1() -> None:
    assert_close(trained(ServerOptimizerHParams(server_learning_rate=0.3)), by_torch(torch.optim.SGD, lr=0.3))
    assert_close(trained(ServerOptimizerHParams()), {n: v + sum(u[n] for u in updates()) for n, v in start().items()})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_equals_torch(momentum: float) -> None:
    mine = ServerOptimizerHParams("momentum", server_learning_rate=0.3, server_momentum=momentum)
    assert_close(trained(mine), by_torch(torch.optim.SGD, lr=0.3, momentum=momentum))


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adaptive_optimizers_follow_the_paper(kind: str, beta1: float) -> None:
    mine = ServerOptimizerHParams(kind, 0.1, beta1, 0.95, 0.01)
    assert_close(trained(mine), by_hand(kind, 0.1, beta1, 0.95, 0.01))


def test_parameters_and_moments_keep_their_type_and_the_arguments_their_values() -> None:
    hparams = ServerOptimizerHParams("yogi")
    params = {name: value.float() for name, value in start().items()}
    moments = server_optimizers.init(params, hparams)
    stepped, after = server_optimizers.apply(params, updates()[0], moments, hparams)
    assert all(value.dtype == torch.float32 for of in (stepped, *after.values()) for value in of.values())
    assert set(after) == {"m", "v"}
    assert all(torch.equal(value, start()[name].float()) for name, value in params.items())
    assert all(
        torch.equal(value, server_optimizers.init(params, hparams)["v"][name]) for name, value in moments["v"].items()
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("server_learning_rate", 0.0),
        ("server_learning_rate", math.inf),
        ("server_tau", 0.0),
        ("server_momentum", 1.0),
        ("server_momentum", -0.1),
        ("server_beta2", 1.0),
        ("server_beta2", math.nan),
    ],
)
def test_bad_settings_are_refused(setting: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{setting} must be"):
        ServerOptimizerHParams(**{setting: value})  # type: ignore[arg-type]
