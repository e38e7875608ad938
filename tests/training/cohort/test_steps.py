"""A user's positions against the padded batches that the local engine trains on."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.rng import stream
from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.training.cohort.steps import steps_of
from flsim.training.hparams import LocalHParams
from flsim.training.local import local_batches

LAYOUT = Layout(12, record_words=6)


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
