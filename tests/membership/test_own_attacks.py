"""Attacks of a user's own: what is refused, and what a call that fails says."""

from pathlib import Path

import pytest
from membership.before_model import before, drawn, in_pairs, untrained

from flsim.attacks.membership.built_in import attack_named
from flsim.attacks.membership.inference import row_of, scores_of
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


def no_attack(one, other):
    return 0


def sorting(candidates):
    candidates.log_probs.sort(axis=1)
    return candidates.log_probs[:, 0]


def zeroing(candidates):
    for value in candidates.model.parameters():
        value.data.zero_()
    return np.zeros(len(candidates))


def worst(candidates):
    return candidates.log_probs.min(axis=1)


def bare(candidates):
    return "words"


def columns(candidates):
    return np.column_stack([candidates.log_probs.min(axis=1), candidates.lengths])


def failing(statistics, is_member):
    raise KeyError("a word")


def of_first(statistics, is_member):
    return lambda values: values[:, 0]


def of_third(statistics, is_member):
    return lambda values: values[:, 2]


thing = 3
loss = worst
no_function = Attack("number", 3)
a_class = Attack("class", Model)
fit_is_number = Attack("fit", worst, fit=3)
fit_fails = Attack("fit", columns, fit=failing)
fit_gives_nothing = Attack("fit", columns, fit=lambda statistics, is_member: None)
learned_fails = Attack("fit", columns, fit=of_third)
one_column = Attack("fit", worst, fit=of_first)
text = Attack("fit", bare, fit=of_first)
works = Attack("fit", columns, fit=of_first)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(f"{SOURCE}# {tmp_path}")  # a content is executed once, and named as it then lay
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Model", "found a class; use a flsim.attacks.membership.Attack or a function of candidates"),
        ("thing", "found a int; use a flsim.attacks.membership.Attack or a function of candidates"),
        ("no_function", "its `score` is 3; make it a function"),
        ("a_class", "its `score` is <class"),
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
        ("sorting", ":23: ValueError: sort array is read-only"),
        ("zeroing", ":zeroing: the code changes the model's "),
        ("fit_fails", ":46: KeyError: 'a word'"),
        ("fit_gives_nothing", ":fit_gives_nothing: fit returned a NoneType; it needs fit(statistics, is_member)"),
        ("learned_fails", ":54: IndexError: "),
        ("one_column", ":one_column: score returned no row of numbers for each of 20 records"),
        ("text", ":text: score returned no row of numbers for each of 20 records"),
    ],
)
def test_an_attack_that_fails_says_so_in_one_line_with_its_file(file: Path, name: str, message: str) -> None:
    records, targets = in_pairs(10)
    with pytest.raises(RunFailed) as failed:
        scores_of(attack_named(f"{file}:{name}"), before(untrained(), records), targets)
    assert str(failed.value).startswith(f"{file}{message}")
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("name", ["worst", "works"])
def test_an_attack_that_works_is_measured(file: Path, name: str) -> None:
    records, targets = in_pairs(10)
    assert 0 <= row_of(attack_named(f"{file}:{name}"), before(untrained(), records), targets)["auroc"] <= 1


def test_it_may_read_the_gradients_of_the_model(file: Path) -> None:
    """A backward pass leaves the parameters as they are."""
    file.write_text(
        "def norm(candidates):\n"
        "    candidates.model(__import__('torch').tensor([[0, 1]])).sum().backward()\n"
        "    return candidates.words\n"
    )
    assert len(attack_named(f"{file}:norm").score(before(untrained(), drawn(5)))) == 5
