"""A packed group against the steps that it was made of."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.engine import DrawnUsers
from flsim.base.rng import stream
from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.training.cohort.packing import EXACT, PackedGroup, Shape, pack, pack_users
from flsim.training.cohort.stacked_trainer import GRAPHS
from flsim.training.cohort.steps import Participant, Steps, steps_of
from flsim.training.hparams import LocalHParams
from flsim.training.local import local_batches

LAYOUT = Layout(12, record_words=6)
MOST = Shape(9, LAYOUT.record_words, 5, 5 * LAYOUT.record_words)

users_strategy = st.lists(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=9), min_size=1, max_size=5)
roundings = st.sampled_from((EXACT, Shape(2, 4, 2, 8), Shape(16, 16, 16, 32), GRAPHS))


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


# A micro-cohort packed at once against its oracle: users laid out one after another, then packed.


RECORD_WORDS = 6
LONGEST = st.lists(st.integers(1, 9), min_size=RECORD_WORDS, max_size=RECORD_WORDS)  # these have no EOS

records_strategy = st.lists(st.lists(st.integers(1, 9), max_size=RECORD_WORDS) | LONGEST, max_size=12)
hparams_strategy = st.builds(
    LocalHParams,
    epochs=st.integers(1, 3),
    batch_size=st.integers(1, 5),
    max_records=st.none() | st.integers(1, 9),
)


def participants(users: list[Records], seed: int) -> list[Participant]:
    return [Participant(records, stream(seed, "local", 3, user)) for user, records in enumerate(users)]


def assert_same(packed: PackedGroup, expected: PackedGroup) -> None:
    assert packed.order.tolist() == expected.order.tolist()
    assert packed.tokens == expected.tokens
    assert packed.shapes == expected.shapes
    assert packed.data.dtype == torch.int32
    assert torch.equal(packed.data, expected.data)


@settings(max_examples=120)
@given(
    users=st.lists(records_strategy, min_size=1, max_size=6),
    hparams=hparams_strategy,
    rounding=roundings,
    bounded=st.booleans(),
    layout=st.sampled_from(("tff", "fedjax", "fedml")),
    seed=st.integers(0, 99),
)
@example([[]], LocalHParams(), EXACT, False, "tff", 0)  # nobody has records
@example([[], [[1]], []], LocalHParams(epochs=2), GRAPHS, True, "tff", 0)  # one word in all
@example([[[]], [[], []]], LocalHParams(batch_size=1), EXACT, True, "tff", 0)  # records without words
@example([[[1]], [[2]] * 12, [[3]]], LocalHParams(2, 2, max_records=5), EXACT, True, "tff", 0)
def test_it_equals_users_laid_out_one_after_another(
    users: list[list[list[int]]], hparams: LocalHParams, rounding: Shape, bounded: bool, layout: str, seed: int
) -> None:
    """Every value of the array, the shapes, the order of users and their numbers of positions."""
    tokens = Layout(14, RECORD_WORDS, layout)
    most = Shape(7, RECORD_WORDS, hparams.batch_size, RECORD_WORDS * hparams.batch_size) if bounded else None
    drawn = [Records.from_lists(records) for records in users]
    one_by_one = [steps_of(records, tokens, hparams, rng) for records, rng in participants(drawn, seed)]
    packed = pack_users(participants(drawn, seed), tokens, hparams, rounding, most)
    assert_same(packed, pack(one_by_one, rounding, most))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_it_equals_them_at_the_sizes_of_the_paper(spread: float) -> None:
    """Users of about 2,000 words at batch 16, of like and of unlike sizes."""
    users, hparams = DrawnUsers(12, spread), LocalHParams()
    drawn = [users[user] for user in range(len(users))]
    most = Shape(12, users.layout.record_words, 16, 16 * users.layout.record_words)
    one_by_one = [steps_of(records, users.layout, hparams, rng) for records, rng in participants(drawn, 0)]
    packed = pack_users(participants(drawn, 0), users.layout, hparams, GRAPHS, most)
    assert_same(packed, pack(one_by_one, GRAPHS, most))


def test_token_ids_beyond_16_bits_stay_whole() -> None:
    """Records hold them in 32 bits; a user whose own ids fit 16 bits may hold them in 16, though EOS does not fit."""
    layout, hparams = Layout(2**17), LocalHParams()
    drawn = [Records.from_lists([[layout.last_word, 5]]), Records.from_lists([[7], [8, 9]])]
    assert [records.tokens.dtype for records in drawn] == [np.uint32, np.uint16]
    packed = pack_users(participants(drawn, 0), layout, hparams)
    assert_same(packed, pack([steps_of(records, layout, hparams, rng) for records, rng in participants(drawn, 0)]))
    assert {layout.last_word, layout.bos, layout.eos} <= set(packed.data.tolist())


# A user's positions against the padded batches that the local engine trains on.


@settings(max_examples=80)
@given(
    users=st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=9),
    epochs=st.integers(1, 3),
    batch_size=st.integers(1, 5),
    cap=st.none() | st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_positions_are_those_of_the_padded_batches(
    users: list[list[int]], epochs: int, batch_size: int, cap: int | None, seed: int
) -> None:
    """Same steps in the same order; within one, the same sequences, longest first."""
    records, hparams = Records.from_lists(users), LocalHParams(epochs, batch_size, max_records=cap)
    steps = steps_of(records, LAYOUT, hparams, stream(seed, "t"))
    batches = list(local_batches(records, LAYOUT, hparams, stream(seed, "t")))
    assert len(steps) == len(batches)
    first = 0
    for index, (end, batch) in enumerate(zip(steps.ends.tolist(), batches, strict=True)):
        real = [row[row != 0].tolist() for row in batch.targets]
        expected = sorted(
            (
                list(zip(inputs.tolist(), targets, strict=False))
                for inputs, targets in zip(batch.inputs, real, strict=True)
            ),
            key=str,
        )
        found: dict[int, list[tuple[int, int]]] = {}
        for position in range(first, end):
            assert steps.step[position] == index
            sequence = found.setdefault(int(steps.row[position]), [])
            assert steps.time[position] == len(sequence)
            sequence.append((int(steps.inputs[position]), int(steps.targets[position])))
        assert sorted(found.values(), key=str) == expected
        lengths = [len(found[row]) for row in range(len(found))]
        assert lengths == sorted(lengths, reverse=True)
        keys = list(zip(steps.time[first:end], steps.row[first:end], strict=True))
        assert keys == sorted(keys)
        first = end
    assert first == len(steps.inputs)


def test_a_cap_draws_other_records_each_round_and_the_same_for_all_epochs() -> None:
    records, hparams = (
        Records.from_lists([[word] for word in range(1, 10)]),
        LocalHParams(epochs=2, batch_size=3, max_records=4),
    )
    drawn = []
    for round_ in range(20):
        steps = steps_of(records, LAYOUT, hparams, stream(0, "local", round_, 0))
        words = [set(steps.targets[(steps.time == 0) & (steps.step // 2 == epoch)]) for epoch in range(2)]
        assert words[0] == words[1]
        assert len(words[0]) == 4
        drawn.append(frozenset(words[0]))
    assert len(set(drawn)) > 10
    assert np.array_equal(sorted(set.union(*map(set, drawn))), range(1, 10))
