"""The ledger: entries merge, survive JSON to the last bit, and compose; bad ones are refused."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_names import with_valid_options

from flsim.base.errors import InputError
from flsim.privacy.accounting import rdp_of
from flsim.privacy.conventions import CONVENTIONS, Convention
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.sampling import SAMPLERS, Sampling

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
    ledger = Ledger.zero()
    for entry in recorded:
        ledger = ledger.record(entry)
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert ledger.rounds == sum(entry.rounds for entry in recorded)


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0]), st.integers(1, 5)), max_size=12))
def test_neighbours_merge_and_order_stays(parts: list[tuple[float, int]]) -> None:
    """Recorded in pieces or round by round, the ledger is the same, and tells the noise of every round."""
    pieces, singles = Ledger.zero(), Ledger.zero()
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
    assert Ledger.zero().record(ENTRY).record(other).entries == (ENTRY, other)


@settings(max_examples=1)
@given(cuts=st.lists(st.integers(1, 30), min_size=2, max_size=3), noise=st.floats(0.8, 3))
@pytest.mark.parametrize(
    "convention",
    [of for of in CONVENTIONS if of.sampler in ("fixed-size", "poisson") and of.name != "replace-one-pld"],
    ids=lambda convention: convention.name,
)
def test_pieces_compose_to_the_whole(convention: Convention, cuts: list[int], noise: float) -> None:
    """Renyi divergences add up; tables of losses are made coarser by every composition, by 1e-4."""
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


def test_an_event_says_what_the_sampler_did_and_how_much_noise_a_user_meets() -> None:
    assert ENTRY.event("S") != ENTRY.event("2S")
    for sampler, sensitivity, noise in (("fixed-size", "2S", 0.5), ("poisson", "S", 1.0)):
        (repeated,) = Ledger((replace(ENTRY, sampler=sampler, rounds=7),)).event(sensitivity).events  # type: ignore[arg-type]
        assert repeated == SelfComposedDpEvent(Sampling(sampler, 1_000, 100)(GaussianDpEvent(noise)), 7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampler": "by-turns"}, "sampler must be one of fixed-size, poisson, .*, fedbuff, found 'by-turns'"),
        ({"noise": "pink"}, "noise must be one of independent, .*, found 'pink'"),
        ({"sampler": 3}, "sampler and noise must be names"),
        ({"population": 0}, "population must be at least 1"),
        ({"cohort": 0}, "cohort must be between 1 and the 1,000"),
        ({"cohort": 1_001}, "cohort must be between 1 and the 1,000"),
        ({"noise_multiplier": -0.1}, r"noise_multiplier must be finite and at least 0, found -0\.1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be finite"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be finite"),
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
