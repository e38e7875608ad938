"""The model's answers that attacks are made of: batches against single records, and fast paths against slow ones."""

import numpy as np
import pytest
import torch
from membership.before_model import LAYOUT, before, before_two, drawn, untrained

from flsim.attacks.membership import candidates
from flsim.attacks.membership.built_in import BLIND, BUILT_IN
from flsim.attacks.membership.candidates import gradient_norms, log_probabilities, moments
from flsim.data.records import Records
from flsim.models.language_model import TrainableModel, loss_sum

ARCHITECTURES = ("cifg", "transformer")


class Fixed(TrainableModel):
    """The words 1, 2 and 3 with probabilities .5, .25 and .25, and no others."""

    label = "fixed"

    def __init__(self) -> None:
        super().__init__(LAYOUT.vocabulary_size, None)  # type: ignore[arg-type]
        logits = torch.full((LAYOUT.vocabulary_size,), -1e4)
        logits[1:4] = torch.log(torch.tensor([0.5, 0.25, 0.25]))
        self.logits = torch.nn.Parameter(logits)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def test_moments_of_three_words() -> None:
    """mu = -1.5 ln 2 and sigma = ln 2 / 2, at each of the twelve positions, as no end follows so long a record."""
    means, deviations = moments(Fixed(), Records.from_lists([[1, 2, 3] * 4]), LAYOUT)
    np.testing.assert_allclose(means, np.full((1, 12), -1.0397207708), rtol=1e-6)
    np.testing.assert_allclose(deviations, np.full((1, 12), 0.3465735903), rtol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_those_of_reading_word_by_word(architecture: str) -> None:
    model, records = untrained(architecture), drawn(20)
    computed = log_probabilities(model, records, LAYOUT)
    for record, values in zip(records, computed, strict=True):
        tokens = record.tolist() + [LAYOUT.eos] * LAYOUT.ends_with_eos(len(record))
        state, log_probs = model.start(torch.tensor([[LAYOUT.bos]]))
        for place, token in enumerate(tokens):
            assert values[place] == pytest.approx(float(log_probs[0, token]), abs=1e-5)
            state, log_probs = model.step(state, torch.tensor([token]))
        assert (values[len(tokens) :] == 0).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_norms_are_those_of_one_record_after_another(architecture: str) -> None:
    model, records = untrained(architecture), drawn(9)
    norms = gradient_norms(model, records, LAYOUT)
    for record, norm in zip(records, norms, strict=True):
        inputs = torch.tensor([[LAYOUT.bos, *record.tolist(), LAYOUT.eos][: LAYOUT.record_words]])
        targets = torch.tensor([[*record.tolist(), LAYOUT.eos][: LAYOUT.record_words]])
        loss, count = loss_sum(model, inputs[:, : targets.shape[1]], targets)
        gradients = torch.autograd.grad(loss / count, list(model.trainable.values()))
        assert norm == pytest.approx(float(torch.cat([value.flatten() for value in gradients]).norm()), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "quantile"])
def test_small_batches_give_the_scores_of_one_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few records, and each record by itself."""
    model, records = untrained(), drawn(12)
    whole = BUILT_IN[name].score(before_two(model, records))
    monkeypatch.setattr(candidates, "FLOATS", 700)  # of 40 words: 17 positions, or one or two records
    np.testing.assert_allclose(BUILT_IN[name].score(before_two(model, records)), whole, rtol=1e-4, atol=1e-6)
    every = before_two(model, records)
    for index, record in enumerate(records):
        one = candidates.Candidates(
            model,
            Records.from_lists([record.tolist()]),
            [every.keys[index]],
            every.vocabulary,
            every.unigram,
            0,
            LAYOUT,
            every.reference,
            every.context,
        )
        np.testing.assert_allclose(BUILT_IN[name].score(one)[0], whole[index], rtol=1e-4, atol=1e-6)


def test_the_blind_control_reads_no_model() -> None:
    records = drawn(10)
    one, other = (BLIND.score(before(untrained(seed=seed), records)) for seed in (0, 1))
    np.testing.assert_array_equal(one, other)
    assert one[:, 0].tolist() == [len(record) for record in records]


ARRAYS = ("words", "lengths", "log_probs", "unigram_log_probs", "reference_log_probs", "unigram", "tokens")


@pytest.mark.parametrize("name", ARRAYS)
def test_attacks_share_arrays_that_none_of_them_can_change(name: str) -> None:
    shared = before(untrained(), drawn(5))
    with pytest.raises(ValueError, match="read-only"):
        getattr(shared, name)[:] = 0
    with pytest.raises(ValueError, match="read-only"):
        getattr(shared, name).sort()
