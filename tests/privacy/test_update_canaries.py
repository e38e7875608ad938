"""Canary users with random updates: what they add to a run, and what they do not change."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import scipy
import torch
from helpers import TINY, MakeCorpus
from sampler_names import with_valid_options

from flsim.algorithms.algorithm import FedAvgHParams
from flsim.algorithms.checkpoint import Provenance, digest_of, load, save
from flsim.algorithms.rounds import FederatedTraining
from flsim.base.errors import InputError
from flsim.base.extensions import options_of, without_options
from flsim.data.corpus import Split
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy import ledger
from flsim.privacy.ledger import LENGTH, AuditHParams, PrivacyHParams, cosines, direction, toss, update_of
from flsim.privacy.sampling import SAMPLERS
from flsim.runs.config import load as load_config
from flsim.training.update import LocalHParams, State, global_norm, with_canaries

MODEL = ModelHParams(embedding=8, units=12)
NOISY = PrivacyHParams("dp", clip=0.5, noise_multiplier=0.5)
Training = Callable[..., FederatedTraining]


@pytest.fixture
def training(make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]]) -> Training:
    """Return a function that makes federated training of 24 users of two records, a quarter of whom are in a cohort."""
    users = make_corpus(random_users(24, 2, 36), vocabulary_size=40).split("train")

    def make(audit: AuditHParams | None = None, sampler: str = "poisson", **settings: Any) -> FederatedTraining:
        named, options = without_options(sampler), options_of(sampler)
        server = FedAvgHParams(rounds=4, cohort=6, sampler=named, sampler_options=options)
        others: dict[str, Any] = {"privacy": NOISY, "seed": 3, "local": LocalHParams(batch_size=2)} | settings
        return FederatedTraining(users, MODEL, server, audit=audit or AuditHParams(), **others)

    return make


def after(trained: FederatedTraining, rounds: int = 4, start: State | None = None) -> State:
    (state,) = trained.states(start or trained.first_state(), rounds, lambda _: False)
    return state


def change(trained: FederatedTraining, state: State) -> Params:
    first = trained.first_state().params
    return {name: value.double() - first[name].double() for name, value in state.params.items()}


@pytest.mark.parametrize("sampler", [with_valid_options(sampler, 6) for sampler in SAMPLERS])
def test_a_round_adds_the_sum_of_canary_updates_to_that_of_the_real_users(training: Training, sampler: str) -> None:
    """A round with canary users minus the same round without them is S x (sum of unit vectors) / cohort, by hand."""
    privacy = PrivacyHParams("clip", clip=0.5)
    audit = AuditHParams(40, canary_coins=True)
    plain, tested = (training(one, sampler, privacy=privacy) for one in (None, audit))
    difference = {
        name: value.double() - after(plain, 1).params[name].double() for name, value in after(tested, 1).params.items()
    }
    drawn = audit.drawn(3, 0, 24, 6, sampler)
    assert len(drawn)
    assert all(toss(3, canary) for canary in drawn.tolist())
    expected = {name: torch.zeros_like(value) for name, value in difference.items()}
    for canary in drawn.tolist():
        vector, norm = direction(3, canary, difference)
        for name, block in vector.items():
            expected[name] += 0.5 * block.double() / norm / 6
    for name, value in difference.items():
        torch.testing.assert_close(value, expected[name], atol=1e-7, rtol=0)  # float32 parameters


def test_an_update_has_the_clip_norm_and_a_direction_that_depends_only_on_its_number() -> None:
    like = {"a": torch.zeros(30, 7), "b": torch.zeros(11)}
    zero = {name: value.double() for name, value in like.items()}
    assert global_norm(update_of(5, 1, 0.3, like)) == pytest.approx(LENGTH * 0.3, rel=1e-12)
    update = with_canaries(zero, np.array([5]), 1, 0.3)
    assert math.sqrt(sum(float((value**2).sum()) for value in update.values())) == pytest.approx(0.3, rel=1e-12)
    turned = with_canaries(dict(reversed(zero.items())), np.array([5]), 1, 0.3)
    assert all(torch.equal(update[name], turned[name]) for name in like)
    assert not any(value.any() for value in zero.values()), "the sum that was passed is left alone"
    assert cosines(update, 1, range(4, 7))[1] == pytest.approx(1, rel=1e-9)


def test_canary_users_change_neither_the_ledger_nor_the_first_adaptive_clip(training: Training) -> None:
    """Only real users are counted, so in the first round an adaptive clip changes as without canary users."""
    privacy = replace(NOISY, target_quantile=0.5, count_noise=2.0)
    plain, tested = (training(audit, privacy=privacy) for audit in (None, AuditHParams(30)))
    assert after(plain).ledger == after(tested).ledger
    assert after(plain, 1).clip == after(tested, 1).clip
    assert digest_of(after(plain, 1)) != digest_of(after(tested, 1))


def test_a_resumed_run_has_the_same_bits(training: Training, tmp_path: Path) -> None:
    tested = training(AuditHParams(30, canary_coins=True))
    path = save(tmp_path, after(tested, 2), Provenance("", "", 40, MODEL))
    assert digest_of(after(tested, 4, load(path)[0])) == digest_of(after(tested))


def test_shards_change_cosines_only_by_rounding(training: Training) -> None:
    measured = []
    for shards in (1, 3):
        tested = training(AuditHParams(30), shards=shards)
        measured.append(cosines(change(tested, after(tested)), 3, range(60)))
    np.testing.assert_allclose(measured[0], measured[1], atol=1e-6)


def test_cosines_of_canary_users_are_larger_than_those_of_unused_vectors(training: Training) -> None:
    """Without canary users, cosines are those of a uniform direction, as are those of unused vectors."""
    plain, tested = training(), training(AuditHParams(200))
    moved = change(plain, after(plain))
    spread = sum(value.numel() for value in moved.values()) ** -0.5
    assert scipy.stats.kstest(cosines(moved, 3, range(200)) / spread, "norm").pvalue > 0.01
    seen = cosines(change(tested, after(tested)), 3, range(400))
    assert scipy.stats.kstest(seen[200:] / spread, "norm").pvalue > 0.01
    assert scipy.stats.mannwhitneyu(seen[:200], seen[200:], alternative="greater").pvalue < 1e-6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("audit.update_canaries=9",), 'privacy.mechanism "none" has no clip; set it to "clip" or "dp"'),
        (("audit.update_canaries=-1",), "update_canaries must be at least 0, found -1"),
        (("audit.canary_coins=true",), "set update_canaries, e.g. to 1000, or remove it"),
        (("training={kind='central'}", "local={}", "audit.update_canaries=9"), "of federated training, but"),
        (
            ("training.algorithm=scaffold", "privacy={mechanism='clip',clip=1.0}", "audit.update_canaries=9"),
            "sends more than a clipped update",
        ),
    ],
)
def test_settings_that_cannot_have_canary_users_are_refused(
    training: Training, tmp_path: Path, overrides: Sequence[str], message: str
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    users = cast(Split, training().users)
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "tiny.toml", overrides).training_of(users, 4)


def test_few_vectors_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 4 vectors are in memory at once: a thousand vectors of the paper's model would take 5.7 GB."""
    made, alive = list[weakref.ref[torch.Tensor]](), list[int]()

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = make(*arguments)
            made.extend(weakref.ref(value) for value in (result[0] if isinstance(result, tuple) else result).values())
            alive.append(sum(one() is not None for one in made))
            return result

        return call

    monkeypatch.setattr(ledger, "direction", counted(direction))
    monkeypatch.setattr("flsim.training.update.update_of", counted(update_of))
    total = with_canaries({"a": torch.zeros(9, dtype=torch.float64)}, np.arange(50), 0, 0.2)
    cosines(total, 0, range(50))
    assert len(alive) == 150
    assert max(alive) <= 4
