"""A micro-cohort packed at once against its oracle: users laid out one after another, then packed."""

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
from flsim.training.cohort.steps import Participant, steps_of
from flsim.training.hparams import LocalHParams

RECORD_WORDS = 6
LONGEST = st.lists(st.integers(1, 9), min_size=RECORD_WORDS, max_size=RECORD_WORDS)  # these have no EOS

records_strategy = st.lists(st.lists(st.integers(1, 9), max_size=RECORD_WORDS) | LONGEST, max_size=12)
hparams_strategy = st.builds(
    LocalHParams,
    epochs=st.integers(1, 3),
    batch_size=st.integers(1, 5),
    max_records=st.none() | st.integers(1, 9),
)
roundings = st.sampled_from((EXACT, Shape(2, 4, 2, 8), GRAPHS))


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
