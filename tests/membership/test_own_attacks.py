"""Attacks of a user's own: what is refused, and what a call that fails says."""

from pathlib import Path

import pytest
from membership.before_model import before, in_pairs, untrained

from flsim.attacks.membership.built_in import attack_named
from flsim.attacks.membership.inference import scores_of
from flsim.base.errors import InputError, RunFailed

SOURCE = """import numpy as np
from flsim.attacks.membership import Attack


class Model:
    def __init__(self, vocabulary_size, hparams):
        self.size = vocabulary_size


def misspelled(candidates):
    return candidates.logprobs.min(axis=1)


def lacking():
    return 0



def zeroing(candidates):
    for value in candidates.model.parameters():
        value.data.zero_()
    return np.zeros(len(candidates))


def worst(candidates):
    return candidates.log_probs.min(axis=1)


def columns(candidates):
    return np.column_stack([candidates.log_probs.min(axis=1), candidates.lengths])



def of_first(statistics, is_member):
    return lambda values: values[:, 0]


def of_third(statistics, is_member):
    return lambda values: values[:, 2]


loss = worst
no_function = Attack("number", 3)
fit_is_number = Attack("fit", worst, fit=3)
fit_gives_nothing = Attack("fit", columns, fit=lambda statistics, is_member: None)
learned_fails = Attack("fit", columns, fit=of_third)
one_column = Attack("fit", worst, fit=of_first)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(f"{SOURCE}# {tmp_path}")  # a content is executed once, and named as it then lay
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Model", "found a class; use a flsim.attacks.membership.Attack or a function of candidates"),
        ("no_function", "its `score` is 3; make it a function"),
        ("loss", "flsim has an attack loss, whose rows this attack would replace; rename it"),
        ("fit_is_number", "its `fit` is 3; make it a function, or remove it"),
    ],
)
def test_what_is_no_attack_is_refused_by_its_name(file: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        attack_named(f"{file}:{name}")
    assert str(refused.value).startswith(f"{file}:{name}: {message}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misspelled", ":11: AttributeError: 'Candidates' object has no attribute 'logprobs'"),
        ("lacking", ":lacking: lacking() takes 0 positional arguments but 1 was given; it needs score(candidates)"),
        ("zeroing", ":zeroing: the code changes the model's "),
        ("fit_gives_nothing", ":fit_gives_nothing: fit returned a NoneType; it needs fit(statistics, is_member)"),
        ("learned_fails", ":39: IndexError: "),
        ("one_column", ":one_column: score returned no row of numbers for each of 20 records"),
    ],
)
def test_an_attack_that_fails_says_so_in_one_line_with_its_file(file: Path, name: str, message: str) -> None:
    records, targets = in_pairs(10)
    with pytest.raises(RunFailed) as failed:
        scores_of(attack_named(f"{file}:{name}"), before(untrained(), records), targets)
    assert str(failed.value).startswith(f"{file}{message}")
    assert "\n" not in str(failed.value)
