"""The table of conventions: narrow, complete, and honest about what is missing."""

import json
import math

import pytest

from flsim.base.errors import InputError
from flsim.privacy.conventions import CONVENTIONS, PAPER, REFUSED, conventions_of
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.table import Line, calibrated, report, to_text

FIXED, POISSON = Entry("fixed-size", 1_000, 10, 1.0, 20), Entry("poisson", 1_000, 10, 1.0, 20)


def test_a_report_has_every_convention_of_the_ledgers_sampler() -> None:
    lines = report(Ledger((POISSON,)), 1e-4)
    assert [line.convention for line in lines] == [of for of in CONVENTIONS if of.sampler == "poisson"]
    for line in lines:
        assert line.epsilon == epsilon(Ledger((POISSON,)), 1e-4, line.convention)
        assert line.note is None


def test_what_cannot_be_computed_is_a_dash_with_a_reason() -> None:
    lines = report(Ledger((FIXED,)), 1e-4)
    (missing,) = (line for line in lines if line.epsilon is None)
    assert missing.convention.accountant == "pld"
    assert missing.to_json()["epsilon"] is None
    assert "refuses SampledWithoutReplacementDpEvent" in missing.to_json()["note"]
    (row,) = (row for row in to_text(lines).splitlines() if " pld  " in row)
    assert row.split() == ["fixed-size", "replace-one", "2S", "pld", "-", "-"]


def test_without_noise_epsilon_is_infinite_and_json_says_null() -> None:
    lines = report(Ledger((Entry("poisson", 1_000, 10, 0.0, 20),)), 1e-4)
    assert all(line.epsilon == math.inf for line in lines)
    assert to_text(lines) == "without noise epsilon is infinite, under every convention\n"
    for line in lines:
        values = json.loads(json.dumps(line.to_json(), allow_nan=False))
        assert values["epsilon"] is None
        assert values["note"] == "without noise epsilon is infinite"


def test_a_ledger_of_several_samplers_has_no_single_number() -> None:
    """No convention is about both: every row says so."""
    lines = report(Ledger((FIXED, POISSON)), 1e-4)
    assert len(lines) == len(conventions_of("fixed-size")) + len(conventions_of("poisson"))
    assert all(line.epsilon is None and "but the ledger has" in str(line.note) for line in lines)


def test_calibration_has_lines_of_noise() -> None:
    """What `calibrate` finds, or its reason."""
    lines = calibrated(FIXED, 2.0, 1e-4)
    assert [line.epsilon for line in lines] == [2.0] * 4
    assert [line.noise_multiplier is None for line in lines] == [line.note is not None for line in lines]
    assert [line.convention.accountant for line in lines if line.note] == ["pld"]


def test_noise_is_shown_instead_of_epsilon() -> None:
    line = Line(PAPER, 3.0, 1.2345)
    assert line.to_json()["noise_multiplier"] == 1.2345
    header, row, *_ = to_text([line], calibration=True).splitlines()
    assert header.split()[-1] == "noise"
    assert row.split()[-1] == "1.235*"  # four digits, rounded up: epsilon is reached


@pytest.mark.parametrize("value", [None, 1e-9, 99_999.5, math.inf])
def test_the_table_fits_a_terminal_and_marks_the_paper(value: float | None) -> None:
    """The table of `flsim privacy` for both usual samplers, and that of every other sampler."""
    others = {one.sampler for one in (*CONVENTIONS, *REFUSED)} - {"fixed-size", "poisson"}
    for sampler in others:
        of_other = to_text([Line(convention, value) for convention in conventions_of(sampler)])
        assert max(map(len, of_other.splitlines())) <= 80
    of_both = (*conventions_of("fixed-size"), *conventions_of("poisson"))
    text = to_text([Line(convention, value) for convention in of_both])
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    marked = [row for row in text.splitlines()[1 : 1 + len(of_both)] if row.endswith("*")]
    assert len(marked) == 1
    assert "mironov-proposition-3" in marked[0]
    assert "\n* the paper's own" in text


def test_an_empty_ledger_is_refused() -> None:
    with pytest.raises(InputError, match="no round is completed"):
        report(Ledger.zero(), 1e-4)
