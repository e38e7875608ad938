"""A packed group against the steps that it was made of."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.rng import stream
from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.training.cohort.packing import EXACT, Shape, pack
from flsim.training.cohort.steps import Steps, steps_of
from flsim.training.hparams import LocalHParams

LAYOUT = Layout(12, record_words=6)
MOST = Shape(9, LAYOUT.record_words, 5, 5 * LAYOUT.record_words)

users_strategy = st.lists(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=9), min_size=1, max_size=5)
roundings = st.sampled_from((EXACT, Shape(2, 4, 2, 8), Shape(16, 16, 16, 32)))


def steps_for(users: list[list[list[int]]], hparams: LocalHParams) -> list[Steps]:
    return [
        steps_of(Records.from_lists(records), LAYOUT, hparams, stream(0, "test", user))
        for user, records in enumerate(users)
    ]


@settings(max_examples=80)
@given(users_strategy, st.integers(1, 3), st.integers(1, 5), roundings)
def test_every_position_is_where_it_belongs_and_nothing_else_is_there(
    users: list[list[list[int]]], epochs: int, batch_size: int, rounding: Shape
) -> None:
    group = steps_for(users, LocalHParams(epochs, batch_size))
    packed = pack(group, rounding, MOST)
    assert sorted(packed.order) == list(range(len(users)))
    assert packed.tokens == [len(steps.inputs) for steps in group]
    lengths = [len(group[user]) for user in packed.order]
    assert lengths == sorted(lengths, reverse=True)
    assert len(packed.shapes) == lengths[0]
    assert packed.data.dtype == torch.int32
    first = 0
    for number, shape in enumerate(packed.shapes):
        assert all(size <= most for size, most in zip(shape, MOST, strict=True))
        parts = shape.parts(packed.data[first : first + shape.values])
        first += shape.values
        assert parts.number.tolist() == [number + 1]
        tokens = np.zeros(shape[:3], np.int64)
        for place in range(shape.users):
            steps = group[packed.order[place]] if place < len(group) else None
            here = steps.step == number if steps is not None else np.zeros(0, bool)
            count = int(here.sum())
            assert parts.counts[place] == count
            if steps is not None and count:
                tokens[place, steps.time[here], steps.row[here]] = steps.inputs[here]
                assert parts.targets[place, :count].tolist() == steps.targets[here].tolist()
                places = (steps.time[here] + 1) * shape.rows + steps.row[here]
                assert parts.places[place, :count].tolist() == places.tolist()
            assert not parts.targets[place, count:].any()
            assert not parts.places[place, count:].any()
        assert parts.tokens.tolist() == tokens.tolist()
        assert all(part.data_ptr() % 16 == packed.data.data_ptr() % 16 for part in parts)
    assert first == len(packed.data)
