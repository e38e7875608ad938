"""Tests of packing all users of a micro-cohort at once, against packing of users whose steps are laid out in turn."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flsim.base.rng import stream
from flsim.data.records import Layout, Records
from flsim.training.cohort.engine import GRAPHS
from flsim.training.cohort.packing import EXACT, PackedGroup, Participant, Shape, pack, pack_users, steps_of
from flsim.training.update import LocalHParams

LAYOUT = Layout(12, record_words=6)

roundings = st.sampled_from((EXACT, Shape(2, 4, 2, 8), Shape(16, 16, 16, 32), GRAPHS))

LONGEST = st.lists(st.integers(1, 9), min_size=LAYOUT.record_words, max_size=LAYOUT.record_words)  # records without EOS

records_strategy = st.lists(st.lists(st.integers(1, 9), max_size=LAYOUT.record_words) | LONGEST, max_size=12)
hparams_strategy = st.builds(
    LocalHParams, epochs=st.integers(1, 3), batch_size=st.integers(1, 5), max_records=st.none() | st.integers(1, 9)
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
@example([[]], LocalHParams(), EXACT, False, "tff", 0)  # no user has records
@example([[], [[1]], []], LocalHParams(epochs=2), GRAPHS, True, "tff", 0)  # one word in total
@example([[[]], [[], []]], LocalHParams(batch_size=1), EXACT, True, "tff", 0)  # records without words
@example([[[1]], [[2]] * 12, [[3]]], LocalHParams(2, 2, max_records=5), EXACT, True, "tff", 0)
def test_packing_at_once_equals_packing_of_users_one_after_another(
    users: list[list[list[int]]], hparams: LocalHParams, rounding: Shape, bounded: bool, layout: str, seed: int
) -> None:
    """The array, the shapes, the order of users and their numbers of positions are equal."""
    tokens = Layout(14, LAYOUT.record_words, layout)
    most = (
        Shape(7, LAYOUT.record_words, hparams.batch_size, LAYOUT.record_words * hparams.batch_size) if bounded else None
    )
    drawn = [Records.from_lists(records) for records in users]
    one_by_one = [steps_of(records, tokens, hparams, rng) for records, rng in participants(drawn, seed)]
    packed = pack_users(participants(drawn, seed), tokens, hparams, rounding, most)
    assert_same(packed, pack(one_by_one, rounding, most))
    assert all(size <= limit for shape in packed.shapes for size, limit in zip(shape, most or shape, strict=True))


def test_token_ids_of_more_than_16_bits_are_kept() -> None:
    """Token ids and EOS need 32 bits; the records of a user whose token ids fit 16 bits may have 16 bits."""
    layout, hparams = Layout(2**17), LocalHParams()
    drawn = [Records.from_lists([[layout.last_word, 5]]), Records.from_lists([[7], [8, 9]])]
    assert [records.tokens.dtype for records in drawn] == [np.uint32, np.uint16]
    packed = pack_users(participants(drawn, 0), layout, hparams)
    assert_same(packed, pack([steps_of(records, layout, hparams, rng) for records, rng in participants(drawn, 0)]))
    assert {layout.last_word, layout.bos, layout.eos} <= set(packed.data.tolist())


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
