"""What is said of a run's privacy names the sampler, the relation, the sensitivity and the conversion."""

import pytest

from flsim.base.errors import InputError
from flsim.privacy.conventions import CONVENTIONS
from flsim.privacy.ledger import Entry, Ledger, epsilon, note, sentence, spent

BY_NAME = {convention.name: convention for convention in CONVENTIONS}


def ledger(sampler: str) -> Ledger:
    return Ledger((Entry(sampler, 316, 32, 2.0, 13),))


@pytest.mark.parametrize(
    ("sampler", "names"), [("fixed-size", ["paper", "replace-one-rdp"]), ("poisson", ["poisson-rdp"])]
)
def test_the_sampler_that_ran_decides_the_conventions(sampler: str, names: list[str]) -> None:
    found = spent(ledger(sampler), sampler, 1e-3)
    assert list(found) == names
    assert all(value == epsilon(ledger(sampler), 1e-3, BY_NAME[name]) for name, value in found.items())
    with pytest.raises(InputError, match="choose a convention for that sampler"):
        spent(ledger(sampler), "poisson" if sampler == "fixed-size" else "fixed-size", 1e-3)


def test_the_sentence_says_what_each_number_means() -> None:
    text = sentence({"paper": 5.6234, "replace-one-rdp": 28.53}, "fixed-size", 1e-7)
    for part in ("user-level", "delta 1e-07", "epsilon 5.62", "paper: replace-one", "epsilon 28.5", "sensitivity 2S"):
        assert part in text
    assert "record-level" in sentence({"poisson-rdp": 3.151}, "poisson", 1e-7, "record")
    assert note({"poisson-rdp": 3.151}, "record") == "record-level epsilon 3.15 (poisson-rdp)"
    assert note({"paper": 5.6234, "replace-one-rdp": 28.53}) == "epsilon 5.62 (paper), epsilon 28.5 (replace-one-rdp)"
