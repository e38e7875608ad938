"""Templates, and the selection of the cheapest with its order of ties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.data.vocabulary import Layout
from flsim.measures.memorization.score import Template, cheapest


def test_templates() -> None:
    layout = Layout(8, name="fedjax")  # PAD, BOS, EOS, words 3 to 6, OOV
    assert Template.words(layout, 2).allowed == ((3, 4, 5, 6), (3, 4, 5, 6))
    assert Template.tokens(layout, 1).allowed == (tuple(range(8)),)
    made = Template.from_positions([4, [6, 3, 3], 2])
    assert made.allowed == ((4,), (3, 6), (2,))
    assert (made.length, made.space) == (3, 2)
    assert [ids.tolist() for ids in made.on(torch.device("cpu"))] == [[4], [3, 6], [2]]
    assert Template.words(Layout(10_000), 4).space == 9_996**4


@pytest.mark.parametrize("allowed", [(), ((1,), ()), ((2, 1),), ((1, 1),), ((-1, 2),)])
def test_a_template_that_is_none_is_refused(allowed: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError, match="template"):
        Template(allowed)


@settings(max_examples=40, derandomize=True)
@given(
    costs=st.integers(1, 9).flatmap(
        lambda columns: st.lists(
            st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, float("inf")]), min_size=columns, max_size=columns),
            min_size=1,
            max_size=5,
        )
    ),
    count=st.integers(1, 12),
)
def test_cheapest_is_the_start_of_a_stable_sort(costs: list[list[float]], count: int) -> None:
    found, columns = cheapest(torch.tensor(costs), count)
    expected, order = torch.tensor(costs).sort(dim=1, stable=True)
    assert torch.equal(found, expected[:, :count])
    assert torch.equal(columns, order[:, :count])
