"""The custom sampler and custom noise of docs/privacy.md: values computed by hand, resumption, accounting, errors."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, SelfComposedDpEvent
from helpers import Experiment

import flsim
from flsim.algorithms.checkpoint import digest_of
from flsim.algorithms.rounds import FederatedTraining
from flsim.algorithms.summation import TreeSum
from flsim.base.errors import InputError, RunFailed
from flsim.base.rng import stream
from flsim.planning.plan import checkpoint_bytes
from flsim.privacy import ledger, noise
from flsim.privacy.accounting import epsilon_of
from flsim.privacy.conventions import CONVENTIONS
from flsim.privacy.ledger import PrivacyHParams
from flsim.runs.config import load as load_config
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.training.central import CentralTraining
from flsim.training.central.hparams import CentralHParams
from flsim.training.update import State

DOCUMENT = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
OWN, SETTINGS = (DOCUMENT.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "toml"))
OVERRIDES = tuple(
    f"{section}.{name}={value!r}"
    for section, values in tomllib.loads(SETTINGS).items()
    for name, value in values.items()
)
MODEL = flsim.Model(3, 5)


@pytest.fixture
def own(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = experiment.folder / "my_privacy.py"
    path.write_text(OWN)
    monkeypatch.chdir(experiment.folder)  # the settings of the document expect the file here
    return path


def algorithm(own: Path, **changes: object) -> flsim.FedAvg:
    settings = tomllib.loads(SETTINGS)["privacy"] | {"noise": f"{own}:TakenBack"} | changes
    return flsim.FedAvg(cohort=5, sampler=f"{own}:Turns", privacy=PrivacyHParams(**settings), shards=1)


def planted(experiment: Experiment) -> flsim.Planted:
    return flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))


def by_hand(training: FederatedTraining, state: State, seed: int) -> dict[str, torch.Tensor]:
    """Return parameters + (sum + z S (fresh_t - fresh_(t-1) / 2)) / qN; z S = 2 x 0.5 = 1."""
    cohort = training.cohort(state.round)
    order = stream(seed, "turns").permutation(24)
    assert cohort.tolist() == sorted(order[(5 * state.round + place) % 24] for place in range(5))
    requests = training.requests(state)
    total = TreeSum.of_replies(training.send_in_process()(requests), requests, 0).total
    assert total is not None

    def fresh(name: str, round_: int) -> torch.Tensor:
        if round_ < 0:
            return torch.zeros(state.params[name].shape, dtype=torch.float64)
        return torch.from_numpy(stream(seed, "noise", round_, name).normal(0.0, 1.0, state.params[name].shape))

    return {
        name: (value + (total.delta[name] + fresh(name, state.round) - fresh(name, state.round - 1) / 2) / 5).float()
        for name, value in state.params.items()
    }


def test_simulated_rounds_equal_those_computed_by_hand(experiment: Experiment, own: Path) -> None:
    users, method = planted(experiment), algorithm(own)
    training = method.config(users, MODEL, 6, 3).training_of(users.users, 6)
    assert isinstance(training, FederatedTraining)
    state = training.first_state()
    for after in flsim.simulate(users, MODEL, method, 6, seed=3):
        expected = by_hand(training, state, 3)
        assert all(torch.equal(after.params[name], value) for name, value in expected.items())
        assert after.moments.keys() == {"noise/before"}
        assert {value.dtype for value in after.moments["noise/before"].values()} == {torch.float64}
        state = after
    assert state.round == 6


def test_the_state_of_noise_is_separate_from_the_state_of_the_optimizer(experiment: Experiment, own: Path) -> None:
    """With Adam, the state of the noise does not depend on the cohorts, so it is also that of another sampler."""
    users, adam = planted(experiment), flsim.ServerOptimizer("adam", 0.1)
    method = replace(algorithm(own), server=adam)
    *_, last = flsim.simulate(users, MODEL, method, 3, seed=3)
    assert last.moments.keys() == {"m", "v", "noise/before"}
    *_, without = flsim.simulate(users, MODEL, replace(algorithm(own), sampler="fixed-size"), 3, seed=3)
    before = without.moments["noise/before"]
    assert all(torch.equal(value, before[name]) for name, value in last.moments["noise/before"].items())


def test_independent_noise_equals_one_draw_with_its_standard_deviation() -> None:
    like, deviation = {"a": torch.zeros(300, 70, dtype=torch.float64)}, 1.7 * 0.3
    drawn, kept = noise.step("independent", 5, like, {"m": like}, 8)
    expected = torch.from_numpy(stream(5, "noise", 8, "a").normal(0.0, deviation, (300, 70)))
    assert torch.equal(deviation * drawn["a"], expected)
    assert kept == {}
    assert noise.init("independent", 5, like) == {}


def test_a_run_resumes_to_the_same_bits_also_from_a_moved_folder(experiment: Experiment, own: Path) -> None:
    run = Run.create(load_config(experiment.config, OVERRIDES), experiment.folder / "run")
    training = run.training()
    whole = list(training.states(training.first_state(), 4))
    resumed = run.load(run.save(whole[1]))
    assert digest_of(resumed) == digest_of(whole[1])
    again = list(Run.open(run.path).training().states(resumed, 4))
    assert [digest_of(state) for state in again] == [digest_of(state) for state in whole[2:]]
    forgetful = replace(resumed, moments=noise.init(f"{own}:TakenBack", 0, resumed.params))
    (_, other) = run.training().states(forgetful, 4)
    assert digest_of(other) != digest_of(whole[3])  # the noise of earlier rounds is missing
    moved = experiment.folder / "moved"
    run.path.rename(moved)
    elsewhere = Run.open(moved)
    state = elsewhere.load(moved / "checkpoints" / "round-000002.safetensors")
    assert [digest_of(after) for after in elsewhere.training().states(state, 4)] == [digest_of(x) for x in again]


def test_the_event_of_custom_noise_is_accounted_and_shown(experiment: Experiment, own: Path) -> None:
    """The event is T rounds of Gaussian noise of multiplier z / 2, which is halved again for sensitivity 2S."""
    run = Run.create(load_config(experiment.config, OVERRIDES), experiment.folder / "run")
    training = run.training()
    *_, state = training.states(training.first_state(), 3)
    saved = run.save(state)
    evaluate_checkpoint(run.path, saved)
    (convention,) = (of for of in CONVENTIONS if of.name == "replace-one-rdp")
    expected = epsilon_of(SelfComposedDpEvent(GaussianDpEvent(0.5), 3), run.delta, convention)
    assert run.epsilons(state) == {"own-replace-one-rdp": expected}
    assert 0 < expected < math.inf
    assert "after Turns sampling" in ledger.sentence(run.epsilons(state), run.config.sampler, run.delta)
    lines = json.loads(experiment.call("privacy", "run", "--json").stdout)
    assert [(line["convention"], line["sampler"]) for line in lines] == [("own-replace-one-rdp", "Turns")]
    assert lines[0]["epsilon"] == expected
    plan = ("--users", "24", "--cohort", "6", "--rounds", "3", "--delta", "0.004", "--sampler", f"{own}:Turns")
    assert "Turns" in experiment.call("privacy", *plan, "--noise-multiplier", "2").stdout
    (copy,) = (run.path / "code").iterdir()
    copy.write_text(OWN + "# another version\n")
    refused = experiment.call("privacy", "run", check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_custom_noise_without_a_known_cost_has_an_infinite_epsilon(experiment: Experiment, own: Path) -> None:
    """With a built-in sampler, the conventions of the paper remain; none of them has a finite epsilon."""
    stated = "return SelfComposedDpEvent(GaussianDpEvent(noise_multiplier / 2), rounds)"
    own.write_text(
        OWN.replace(stated, "return NonPrivateDpEvent()").replace("import Gauss", "import NonPrivateDpEvent, Gauss")
    )
    users = planted(experiment)
    *_, state = flsim.simulate(users, MODEL, replace(algorithm(own), sampler="poisson"), 2)
    (entry,) = state.ledger.entries
    assert entry.event("S") == NonPrivateDpEvent()
    assert ledger.spent(state.ledger, "poisson", 1e-3) == {"poisson-rdp": math.inf}


def test_custom_code_changes_the_name_the_digest_and_the_plan_of_a_run(experiment: Experiment, own: Path) -> None:
    plain = load_config(experiment.config)
    explicit = load_config(experiment.config, ("privacy.noise=independent", "training.sampler=fixed-size"))
    assert explicit.digest == plain.digest
    private = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=2.0")
    usual, mine = load_config(experiment.config, private), load_config(experiment.config, OVERRIDES)
    assert mine.setting == "Non-IID, DP-FedAvg, S=0.5, z=2, TakenBack, b_u=6, Turns"
    assert mine.digest != usual.digest
    assert checkpoint_bytes(mine, 40) == 3 * checkpoint_bytes(usual, 40)  # the state of the noise is float64
    before = mine.digest
    own.write_text(OWN + "# another version\n")
    assert mine.digest != before


EVENT = "    def event(self, population, mechanism):\n        return mechanism"
FOLDER = "[^:]*"  # the folder in the user's setting, not a digest
UNSEEDED = "np.random.default_rng()"
RANDOM = "fresh = {name: torch.randn_like(value) for name, value in self.fresh(round_).items()}"
STATED = "return SelfComposedDpEvent(GaussianDpEvent(noise_multiplier / 2), rounds)"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return mechanism", "return type(mechanism).no", r"my_privacy\.py:\d+: AttributeError: .*'no'"),
        ("np.sort(order[places])", "order[places]", "round 1 did not draw a cohort of 5 to 5 users; return distinct"),
        ("draw(self, seed, round_, population)", "draw(self, seed)", r"it needs draw\(seed, round_, population\)"),
        ("class Turns(Sampler)", "class Turns", r"is not a subclass of flsim\.privacy\.sampling\.Sampler; derive it"),
        ("return mechanism", "return 3", rf"^{FOLDER}/my_privacy\.py:Turns: event returned 3; return an event of"),
        (STATED, "return 3", rf"^{FOLDER}/my_privacy\.py:TakenBack: event returned 3; return an event of"),
        (STATED, "return None", rf"^{FOLDER}/my_privacy\.py:TakenBack: this noise has no privacy event"),
        ('stream(seed, "turns")', UNSEEDED, "Turns: the cohort differs between two calls for round 1"),
        ("fresh = self.fresh(round_)", RANDOM, "TakenBack: the noise differs between two calls"),
        ("return {name: fresh[name] -", "return {name: math.nan * fresh[name] -", "'noise' has values that"),
        (STATED, "return Unknown()", "the rdp of dp_accounting does not support"),
        ('{"before": fresh}', "{}", r"a round changes the slots \['before'\] into \[\]; keep the same slots"),
        ('{"before": fresh}', '{"before": {}}', "'before' must hold tensors with the names and shapes"),
    ],
)
def test_errors_in_custom_code_are_reported_before_training(
    experiment: Experiment, own: Path, old: str, new: str, message: str
) -> None:
    assert OWN.count(old) == 1
    unknown = (
        "from dp_accounting import DpEvent\n\n\nclass Unknown(DpEvent):\n    pass\n\n\n" if "Unknown" in new else ""
    )
    own.write_text("import math\n" + unknown + OWN.replace(old, new))
    with pytest.raises(InputError, match=message) as caught:
        flsim.simulate(planted(experiment), MODEL, algorithm(own), 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("places = np", "population //= 2 - round_; places = np", "ZeroDivisionError"),
        ("fresh[name] -", "fresh[name] / (2 - round_) -", "'noise' has values that are not finite"),
    ],
)
def test_errors_of_custom_code_in_a_later_round_fail_the_run_and_name_their_place(
    experiment: Experiment, own: Path, old: str, new: str, message: str
) -> None:
    own.write_text(OWN.replace(old, new))
    states = flsim.simulate(planted(experiment), MODEL, algorithm(own), 4)
    assert next(states).round == 1
    assert next(states).round == 2
    with pytest.raises(RunFailed, match=rf"my_privacy\.py:(\d+|TakenBack): {message}") as caught:
        next(states)
    assert not isinstance(caught.value, flsim.Diverged)


def test_custom_noise_needs_the_dp_mechanism_and_federated_training(experiment: Experiment, own: Path) -> None:
    process, users = f"{own}:TakenBack", planted(experiment)
    with pytest.raises(InputError, match=r'"clip" adds no noise; remove privacy\.noise'):
        PrivacyHParams("clip", clip=0.5, noise=process)

    with pytest.raises(InputError, match=r"privacy\.noise is for users' updates"):
        CentralTraining(users.users, CentralHParams(), 0, privacy=algorithm(own).privacy, model=MODEL)
    own.write_text(OWN.replace(EVENT, ""))
    clipped = replace(algorithm(own), privacy=PrivacyHParams("clip", clip=0.5))
    *_, last = flsim.simulate(users, MODEL, clipped, 2)  # needs no event, because a clip without noise has no epsilon
    assert last.round == 2
    assert last.moments == {}


def test_cohort_sizes_may_differ_if_the_sampler_states_a_range(experiment: Experiment, own: Path) -> None:
    sizes = "\n    def sizes(self, population):\n        return 0, population\n"
    own.write_text(
        OWN.replace("np.sort(order[places])", "np.sort(order[places])[round_ :]").replace(EVENT, EVENT + sizes)
    )
    training = algorithm(own).config(users := planted(experiment), MODEL, 4, 0).training_of(users.users, 4)
    assert isinstance(training, FederatedTraining)
    assert [len(training.cohort(round_)) for round_ in range(6)] == [5, 4, 3, 2, 1, 0]
    assert training.cohort(0).dtype == np.int64
