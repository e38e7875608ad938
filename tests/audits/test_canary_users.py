"""Canary users of a run, audited: the estimate against published values and truths, the bound against the ledger."""

import io
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import TESTED, Flsim, MakeCorpus, Trained

from flsim.algorithms.built_in import FedAvgHParams
from flsim.algorithms.checkpoint import load
from flsim.algorithms.rounds import FederatedTraining
from flsim.attacks.audit import coins
from flsim.attacks.audit.rounds import CanaryUsers, epsilon_of_cosines
from flsim.attacks.audit.trade_off import epsilon_of_gaussian
from flsim.base.rng import stream
from flsim.models.architectures import ModelHParams
from flsim.privacy.conventions import sound_convention
from flsim.privacy.ledger import epsilon
from flsim.privacy.mechanism import PrivacyHParams
from flsim.privacy.update_canaries import AuditHParams, cosines, direction, toss
from flsim.runs.folder import Run
from flsim.training.hparams import LocalHParams
from flsim.training.update import with_canaries


@pytest.mark.parametrize(("dimension", "value"), [(200, 2.375326), (2_000, 2.317789)])
def test_published_values(dimension: int, value: float) -> None:
    """google-research/federated: one_shot_epe/empirical_privacy_estimation_test.py, normal cosines against chance."""
    assert epsilon_of_cosines(dimension**-0.5, dimension**-0.5, dimension, 0.01) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0])
def test_the_estimate_is_near_the_truth_of_a_gaussian_mechanism(noise: float) -> None:
    """A sum of 200 unit vectors in 2,000 dimensions and noise of this deviation: mu is 1 / noise for each of them."""
    zero = {"a": torch.zeros(2_000, dtype=torch.float64)}
    total = with_canaries(zero, np.arange(200), 0, 1.0)
    total["a"] += torch.from_numpy(stream(0, "test of estimates").normal(0, noise, 2_000))
    measured = cosines(total, 0, range(400))
    users = CanaryUsers(measured[:200], np.ones(200, np.bool_), measured[200:], False, 2_000, 1e-5)
    truth = epsilon_of_gaussian(1 / noise, 1e-5)
    assert users.estimate(users.members) == pytest.approx(truth, rel=0.3)
    chance = users.estimate(users.others)
    assert chance is not None
    if noise == 1.0:
        assert chance < 0.5 * truth


def test_the_bound_is_below_the_ledgers_epsilon(
    make_corpus: MakeCorpus, random_users: Callable[..., list[list[list[int]]]]
) -> None:
    """20 seeds of a run of epsilon 0.6, of which at most 1 may be above; with next to no noise much more is proven."""
    users = make_corpus(random_users(8, 2, 36), vocabulary_size=40).split("train")
    server, canary_users = FedAvgHParams(rounds=2, cohort=8, sampler="poisson"), AuditHParams(100, canary_coins=True)

    def bound_and_claim(seed: int, multiplier: float) -> tuple[float, float]:
        privacy = PrivacyHParams("dp", clip=0.5, noise_multiplier=multiplier)
        training = FederatedTraining(
            users, ModelHParams(embedding=4, units=4), server, LocalHParams(), privacy, seed, audit=canary_users
        )
        first = training.first_state()
        (last,) = training.states(first, 2, lambda _: False)
        change = {name: value.double() - first.params[name].double() for name, value in last.params.items()}
        right = coins.correct_guesses(cosines(change, seed, range(100)), canary_users.present(seed), 10)
        claimed = epsilon(last.ledger, 1e-5, sound_convention("poisson"))
        return coins.epsilon_of_coins(100, 20, right, 1e-5), claimed

    bounds = [bound_and_claim(seed, 10.0) for seed in range(20)]
    assert all(claimed == pytest.approx(0.6, abs=0.2) for _, claimed in bounds)
    assert sum(bound > claimed for bound, claimed in bounds) <= 1
    assert bound_and_claim(0, 0.01)[0] > 1, "the attack finds those that noise does not hide"


def test_an_audit_of_a_run_with_canary_users(trained_here: Trained, flsim: Flsim) -> None:
    """Coins, cosines and guesses are computed again from the checkpoint, with numpy."""
    run = trained_here(*TESTED)
    code, out, err = flsim("audit", run, "--format", "csv")
    assert code == 0, err
    rows = {row["method"]: row for row in pd.read_csv(io.StringIO(out)).to_dict("records")}
    opened = Run.open(run)
    state, first = load(sorted((run / "checkpoints").iterdir())[-1])[0], opened.training().first_state()
    names = sorted(state.params)
    moved = np.concatenate([(state.params[name].double() - first.params[name].double()).flatten() for name in names])
    vectors = [direction(0, canary, state.params)[0] for canary in range(60)]
    flat = np.stack([np.concatenate([vector[name].flatten() for name in names]) for vector in vectors]).astype(float)
    measured = flat @ moved / np.linalg.norm(flat, axis=1) / np.linalg.norm(moved)
    tossed = np.array([toss(0, canary) for canary in range(60)])
    order = np.argsort(measured)
    right = tossed[order[-6:]].sum() + (~tossed[order[:6]]).sum()
    bound, estimate = rows["epsilon, canary users by coins"], rows["epsilon, canary users"]
    assert (bound["kind"], bound["detected"], bound["n_in"], bound["n_out"]) == (
        "bound",
        right,
        tossed.sum(),
        60 - tossed.sum(),
    )
    delta = opened.delta
    assert bound["low"] == pytest.approx(coins.epsilon_of_coins(60, 12, int(right), delta))
    ins = measured[tossed]
    assert estimate["kind"] == "estimate"
    assert estimate["estimate"] == pytest.approx(
        epsilon_of_cosines(ins.mean(), ins.std(ddof=1), len(moved), delta), rel=1e-6
    )
    assert not rows["trade-off, canary users by coins"]["refuted"]
    assert (bound["trials"], estimate["n_in"]) == (12, tossed.sum())
