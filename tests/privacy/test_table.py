"""The table of conventions, the sentences about the privacy of a run, and calibration, which inverts epsilon."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.privacy.conventions import CONVENTIONS, PAPER, conventions_of
from flsim.privacy.ledger import Entry, Ledger, epsilon, note, sentence, spent
from flsim.privacy.table import TOLERANCE, EpsilonLine, calibrate, calibrated, report, to_text

BY_NAME = {convention.name: convention for convention in CONVENTIONS}
FIXED, POISSON = Entry("fixed-size", 1_000, 10, 1.0, 20), Entry("poisson", 1_000, 10, 1.0, 20)


def test_a_report_has_every_convention_of_the_ledgers_sampler() -> None:
    lines = report(Ledger((POISSON,)), 1e-4)
    assert [line.convention for line in lines] == [of for of in CONVENTIONS if of.sampler == "poisson"]
    for line in lines:
        assert line.epsilon == epsilon(Ledger((POISSON,)), 1e-4, line.convention)
        assert line.note is None


def test_an_epsilon_that_cannot_be_computed_is_a_dash_with_a_reason() -> None:
    lines = report(Ledger((FIXED,)), 1e-4)
    (missing,) = (line for line in lines if line.epsilon is None)
    assert missing.convention.accountant == "pld"
    assert missing.to_json()["epsilon"] is None
    assert "does not support SampledWithoutReplacementDpEvent" in missing.to_json()["note"]
    (row,) = (row for row in to_text(lines).splitlines() if " pld  " in row)
    assert row.split() == ["fixed-size", "replace-one", "2S", "pld", "-", "-"]
    text = " ".join(to_text(lines).split())
    assert '-: convention "replace-one-pld": the pld of dp_accounting does not support Sampled' in text
    assert "Sound: sensitivity 2S (S: the clip norm) under replace-one" in text
    assert "add-or-remove-one" not in text


def test_without_noise_epsilon_is_infinite_and_null_in_json() -> None:
    lines = report(Ledger((Entry("poisson", 1_000, 10, 0.0, 20),)), 1e-4)
    assert all(line.epsilon == math.inf for line in lines)
    assert to_text(lines) == "without noise epsilon is infinite, under every convention\n"
    for line in lines:
        values = json.loads(json.dumps(line.to_json(), allow_nan=False))
        assert values["epsilon"] is None
        assert values["note"] == "without noise epsilon is infinite"


def test_a_ledger_of_several_samplers_has_no_epsilon() -> None:
    """No convention is for both samplers, and the note of every row states this."""
    lines = report(Ledger((FIXED, POISSON)), 1e-4)
    assert len(lines) == len(conventions_of("fixed-size")) + len(conventions_of("poisson"))
    assert all(line.epsilon is None and "but the ledger has" in str(line.note) for line in lines)


def test_calibration_has_a_noise_multiplier_or_a_reason_in_each_line() -> None:
    lines = calibrated(FIXED, 2.0, 1e-4)
    assert [line.epsilon for line in lines] == [2.0] * 4
    assert [line.noise_multiplier is None for line in lines] == [line.note is not None for line in lines]
    assert [line.convention.accountant for line in lines if line.note] == ["pld"]


def test_noise_is_shown_instead_of_epsilon() -> None:
    line = EpsilonLine(PAPER, 3.0, 1.2345)
    assert line.to_json()["noise_multiplier"] == 1.2345
    header, row, *_ = to_text([line], calibration=True).splitlines()
    assert header.split()[-1] == "noise"
    assert row.split()[-1] == "1.235*"  # four digits, rounded up: epsilon is reached


def test_an_empty_ledger_is_refused() -> None:
    with pytest.raises(InputError, match="no round is completed"):
        report(Ledger(), 1e-4)


def ledger_of(sampler: str) -> Ledger:
    return Ledger((Entry(sampler, 316, 32, 2.0, 13),))


@pytest.mark.parametrize(
    ("sampler", "names"), [("fixed-size", ["paper", "replace-one-rdp"]), ("poisson", ["poisson-rdp"])]
)
def test_the_sampler_that_ran_decides_the_conventions(sampler: str, names: list[str]) -> None:
    found = spent(ledger_of(sampler), sampler, 1e-3)
    assert list(found) == names
    assert all(value == epsilon(ledger_of(sampler), 1e-3, BY_NAME[name]) for name, value in found.items())
    with pytest.raises(InputError, match="choose a convention for that sampler"):
        spent(ledger_of(sampler), "poisson" if sampler == "fixed-size" else "fixed-size", 1e-3)


def test_the_sentence_explains_each_number() -> None:
    text = sentence({"paper": 5.6234, "replace-one-rdp": 28.53}, "fixed-size", 1e-7)
    for part in ("user-level", "delta 1e-07", "epsilon 5.62", "paper: replace-one", "epsilon 28.5", "sensitivity 2S"):
        assert part in text
    assert "record-level" in sentence({"poisson-rdp": 3.151}, "poisson", 1e-7, "record")
    assert note({"poisson-rdp": 3.151}, "record") == "record-level epsilon 3.15 (poisson-rdp)"
    assert note({"paper": 5.6234, "replace-one-rdp": 28.53}) == "epsilon 5.62 (paper), epsilon 28.5 (replace-one-rdp)"


@pytest.mark.parametrize("name", ["paper", "poisson-rdp", pytest.param("poisson-pld", marks=pytest.mark.nightly)])
def test_calibrated_noise_reaches_epsilon_and_slightly_less_noise_does_not(name: str) -> None:
    convention, target = BY_NAME[name], 3.0
    planned = Entry(convention.sampler, 10_000, 100, 0.0, 300)
    noise = calibrate(planned, target, 1e-6, convention)

    def cost(multiplier: float) -> float:
        return epsilon(Ledger((replace(planned, noise_multiplier=multiplier),)), 1e-6, convention)

    assert cost(noise) <= target < cost(noise / (1 + TOLERANCE))


@settings(max_examples=4)
@given(noise=st.floats(0.6, 20), rounds=st.integers(1, 10_000), guess=st.floats(0.05, 50))
def test_calibration_inverts_epsilon_from_any_guess(noise: float, rounds: int, guess: float) -> None:
    convention = BY_NAME["poisson-rdp"]
    planned = Entry("poisson", 10_000, 100, noise, rounds)
    target = epsilon(Ledger((planned,)), 1e-6, convention)
    assert calibrate(planned, target, 1e-6, convention, guess) == pytest.approx(noise, rel=2 * TOLERANCE)


def test_an_epsilon_below_the_least_of_the_conversion_is_refused() -> None:
    """Mironov's Proposition 3 adds log(1 / delta) / (order - 1): at orders to 1,024 and delta 1e-7 at least 0.0157."""
    with pytest.raises(InputError, match=r'"paper": no noise multiplier gives epsilon 0\.01'):
        calibrate(Entry("fixed-size", 100, 100, 0.0, 1), 0.01, 1e-7, PAPER)


@pytest.mark.parametrize("target", [0.0, -1.0, 1e300, math.inf, math.nan])
def test_the_target_is_in_the_range_of_accountants(target: float) -> None:
    with pytest.raises(InputError, match=r"epsilon must be from 1e-06 to 1e\+06"):
        calibrate(Entry("fixed-size", 100, 10, 0.0, 1), target, 1e-7, PAPER)


def test_the_table_marks_the_papers_convention() -> None:
    text = to_text([EpsilonLine(one, 1.0) for one in (*conventions_of("fixed-size"), *conventions_of("poisson"))])
    (marked,) = (row for row in text.splitlines() if row.endswith("*"))
    assert "mironov-proposition-3" in marked
    assert max(map(len, text.splitlines())) <= 80
