"""Epsilon against the paper, other projects and two libraries; properties of epsilon and the ledger; errors."""

import math
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from sampler_names import with_valid_options

from flsim.base.errors import InputError
from flsim.privacy.accounting import ORDERS, epsilon_of, rdp_of
from flsim.privacy.conventions import CONVENTIONS, PAPER, Convention
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.sampling import SAMPLERS, Sampling

BY_NAME = {convention.name: convention for convention in CONVENTIONS}
POISSON = BY_NAME["poisson-rdp"]
N, COHORT, DELTA = 392_000, 5_000, 1e-7
NAMES = [convention.name for convention in CONVENTIONS if convention.name != "replace-one-pld"]

noises = st.floats(0.5, 5)
counts = st.integers(1, 5_000)
shares = st.sampled_from([0.001, 0.01, 0.1, 0.5])


def spent(convention: Convention, rounds: int, noise: float = 1.0, delta: float = DELTA, share: float = 0.01) -> float:
    entry = Entry(convention.sampler, 100_000, int(share * 100_000), noise, rounds)
    return epsilon(Ledger((entry,)), delta, convention)


@pytest.mark.parametrize(
    ("name", "epochs_100", "epochs_10", "within"),
    [
        ("paper", 18.77, 5.62, 0.01),
        ("paper-tight", 17.82, 5.07, 0.01),
        ("replace-one-rdp", 152.8, 28.5, 0.1),
        ("poisson-rdp", 9.30, 3.15, 0.01),
        ("poisson-pld", 8.73, 2.79, 0.01),
    ],
)
def test_the_papers_run(name: str, epochs_100: float, epochs_10: float, within: float) -> None:
    """The convention "paper" gives (18.8, 1e-7) after 100 epochs and (5.6, 1e-7) after 10, as Thakkar et al. (2020),
    section 4.4: 5,000 of 392,000 users, z = 1. dp_accounting 0.6 gave the other rows."""
    convention = BY_NAME[name]
    for rounds, expected in ((7_840, epochs_100), (784, epochs_10)):
        ledger = Ledger((Entry(convention.sampler, N, COHORT, 1.0, rounds),))
        assert epsilon(ledger, DELTA, convention) == pytest.approx(expected, abs=within)


@pytest.mark.parametrize(
    ("convention", "entry", "delta", "expected"),
    [
        ("poisson-rdp", Entry("poisson", 100, 4, 1.5, 2_250), 1e-5, pytest.approx(7.32911117143, abs=0.01)),
        ("poisson-pld", Entry("poisson", 10, 1, 3.0, 512), 1e-6, pytest.approx(3.77, abs=0.005)),
    ],
)
def test_epsilons_of_other_projects(convention: str, entry: Entry, delta: float, expected: float) -> None:
    """Sources: opacus at 3993387, tests/accountants_test.py; jax_privacy at 12d6c56, jax_privacy/accounting.py."""
    assert epsilon(Ledger((entry,)), delta, BY_NAME[convention]) == expected


@settings(max_examples=2)
@given(noise=st.floats(0.8, 5), rounds=st.integers(1, 1_000), share=st.sampled_from([0.001, 0.01, 0.05]))
def test_pld_epsilon_is_at_most_rdp_epsilon_and_agrees_with_opacus(noise: float, rounds: int, share: float) -> None:
    """The PLD of dp_accounting is an upper bound that rounds losses to 1e-4. Opacus's PRV is within twice 0.01."""
    rdp, pld = (spent(BY_NAME[name], rounds, noise, share=share) for name in ("poisson-rdp", "poisson-pld"))
    accountant = PRVAccountant()
    accountant.history = [(noise, int(share * 100_000) / 100_000, rounds)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is")  # only determines the size of a table
        prv = accountant.get_epsilon(DELTA, eps_error=0.01)
    assert pld <= rdp
    assert abs(pld - prv) <= 2 * 0.01 + 1e-3


@settings(max_examples=10)
@given(noise=noises, rounds=counts, share=shares)
def test_opacus_has_the_same_renyi_divergences(noise: float, rounds: int, share: float) -> None:
    """flsim and Opacus are exact, but Opacus ends its series at terms below e^-30 (`_compute_log_a_for_frac_alpha`)."""
    event = SelfComposedDpEvent(PoissonSampledDpEvent(share, GaussianDpEvent(noise)), rounds)
    few = ORDERS <= 63  # Opacus overflows beyond
    ours, orders = rdp_of(event, POISSON)[few], ORDERS[few]
    published_code = compute_rdp(q=share, noise_multiplier=noise, steps=rounds, orders=orders.tolist())
    last_terms = rounds * 4 * math.exp(-30) / (orders - 1)
    assert (abs(ours - np.asarray(published_code)) <= 1e-6 * ours + last_terms).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_ledger_has_epsilon_0_and_a_round_without_noise_an_infinite_one(name: str) -> None:
    convention = BY_NAME[name]
    sampler = with_valid_options(convention.sampler, 10)
    noisy, bare = Entry(sampler, 100, 10, 1.0, 1), Entry(sampler, 100, 10, 0.0, 1)
    assert epsilon(Ledger(), DELTA, convention) == 0
    assert epsilon(Ledger((noisy, bare, noisy)), DELTA, convention) == math.inf


@pytest.mark.parametrize(
    ("convention", "message"),
    [
        (BY_NAME["replace-one-pld"], "the pld of dp_accounting does not support SampledWithoutReplacementDpEvent"),
        (
            Convention("poisson", "replace-one", "S", "rdp", "tight", "odd"),
            r"does not support PoissonSampledDpEvent \(neighboring_relation must be `ADD_OR_REMOVE_ONE`",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, (value.sampler, value.relation))),
)
def test_conventions_that_dp_accounting_does_not_support_are_refused(convention: Convention, message: str) -> None:
    with pytest.raises(InputError, match=message):
        epsilon(Ledger((Entry(convention.sampler, 100, 10, 1.0, 1),)), DELTA, convention)


@pytest.mark.parametrize("name", ["paper", "poisson-rdp"])
def test_laplace_noise_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"(PoissonSampled|Laplace)DpEvent"):
        epsilon_of(PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)), DELTA, BY_NAME[name])


def test_a_convention_for_another_sampler_is_refused() -> None:
    with pytest.raises(InputError, match=r'"paper" is for fixed-size sampling, but the ledger has poisson rounds'):
        epsilon(Ledger((Entry("poisson", 100, 10, 1.0, 1),)), DELTA, PAPER)


def test_an_epsilon_that_is_too_large_for_tabulated_losses_is_refused() -> None:
    with pytest.raises(InputError, match=r"losses are tabulated up to epsilon 100, and RDP computes"):
        spent(BY_NAME["poisson-pld"], 1_000, 0.1)


entries = st.builds(
    lambda sampler, cohort, others, noise, rounds: Entry(
        with_valid_options(sampler, cohort), cohort + others, cohort, noise, rounds
    ),
    st.sampled_from(list(SAMPLERS)),
    st.integers(1, 1_000),
    st.integers(0, 1_000),
    st.floats(0, 1e300),
    st.integers(1, 10_000),
)
ENTRY = Entry("fixed-size", 1_000, 100, 1.0, 1)


@given(st.lists(entries, max_size=8))
def test_json_reads_back_bit_for_bit(recorded: list[Entry]) -> None:
    ledger = Ledger()
    for entry in recorded:
        ledger = ledger.record(entry)
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert ledger.rounds == sum(entry.rounds for entry in recorded)


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0]), st.integers(1, 5)), max_size=12))
def test_equal_consecutive_rounds_merge_and_keep_their_order(parts: list[tuple[float, int]]) -> None:
    """The ledger is the same whether rounds are recorded together or singly, and it has the noise of every round."""
    pieces, singles = Ledger(), Ledger()
    for noise, rounds in parts:
        pieces = pieces.record(replace(ENTRY, noise_multiplier=noise, rounds=rounds))
        for _ in range(rounds):
            singles = singles.record(replace(ENTRY, noise_multiplier=noise))
    assert pieces == singles
    told = [entry.noise_multiplier for entry in pieces.entries for _ in range(entry.rounds)]
    assert told == [noise for noise, rounds in parts for _ in range(rounds)]
    noises = [entry.noise_multiplier for entry in pieces.entries]
    assert all(before != after for before, after in pairwise(noises))


@pytest.mark.parametrize(
    "changed", [{"sampler": "poisson"}, {"population": 1_001}, {"cohort": 99}, {"noise_multiplier": 2.0}]
)
def test_other_rounds_do_not_merge(changed: dict[str, object]) -> None:
    other = replace(ENTRY, **changed)  # type: ignore[arg-type]
    assert Ledger().record(ENTRY).record(other).entries == (ENTRY, other)


@settings(max_examples=1)
@given(cuts=st.lists(st.integers(1, 30), min_size=2, max_size=3), noise=st.floats(0.8, 3))
@pytest.mark.parametrize(
    "convention",
    [of for of in CONVENTIONS if of.sampler in ("fixed-size", "poisson") and of.name != "replace-one-pld"],
    ids=lambda convention: convention.name,
)
def test_parts_compose_to_the_complete_training(convention: Convention, cuts: list[int], noise: float) -> None:
    """Renyi divergences of the parts add up. Every composition makes tables of losses coarser, by 1e-4."""
    sampler = with_valid_options(convention.sampler, 100)
    pieces = Ledger(tuple(Entry(sampler, 10_000, 100, noise, rounds) for rounds in cuts))
    whole = Ledger((Entry(sampler, 10_000, 100, noise, sum(cuts)),))
    tolerance = {"rdp": 1e-9, "pld": 1e-3}[convention.accountant]
    assert epsilon(pieces, 1e-6, convention) == pytest.approx(epsilon(whole, 1e-6, convention), rel=1e-9, abs=tolerance)


@pytest.mark.parametrize("convention", [of for of in CONVENTIONS if of.accountant == "rdp"], ids=lambda of: of.name)
def test_different_rounds_add_their_renyi_divergences(convention: Convention) -> None:
    sampler = with_valid_options(convention.sampler, 50)
    one, two = Entry(sampler, 1_000, 10, 1.0, 30), Entry(sampler, 1_000, 50, 2.0, 4)
    alone = [rdp_of(Ledger((entry,)).event(convention.sensitivity), convention) for entry in (one, two)]
    both = rdp_of(Ledger((one, two)).event(convention.sensitivity), convention)
    assert both == pytest.approx(alone[0] + alone[1])


def test_an_event_has_the_sampling_of_its_entry_and_the_noise_relative_to_the_sensitivity() -> None:
    assert ENTRY.event("S") != ENTRY.event("2S")
    for sampler, sensitivity, noise in (("fixed-size", "2S", 0.5), ("poisson", "S", 1.0)):
        (repeated,) = Ledger((replace(ENTRY, sampler=sampler, rounds=7),)).event(sensitivity).events  # type: ignore[arg-type]
        assert repeated == SelfComposedDpEvent(Sampling(sampler, 1_000, 100)(GaussianDpEvent(noise)), 7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampler": "by-turns"}, "sampler must be one of fixed-size, poisson, .*, fedbuff, found 'by-turns'"),
        ({"noise": "pink"}, "noise must be one of independent, .*, found 'pink'"),
        ({"sampler": 3}, "sampler must be text, found 3"),
        ({"population": 0}, "population must be at least 1"),
        ({"cohort": 0}, "cohort must be at least 1"),
        ({"cohort": 1_001}, "cohort must be between 1 and the 1,000"),
        ({"noise_multiplier": -0.1}, r"noise_multiplier must be at least 0, found -0\.1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be a finite number"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a finite number"),
        ({"rounds": 0}, "rounds must be at least 1"),
    ],
)
def test_impossible_rounds_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(ENTRY, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '[{"sampler": "poisson"}]', "null"])
def test_a_damaged_ledger_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a privacy ledger"):
        Ledger.from_json(text)
