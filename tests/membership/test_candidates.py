"""The model's answers that attacks are made of: batches against single records, and fast paths against slow ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from membership.before_model import LAYOUT, before, before_two, drawn, untrained

from flsim.attacks.membership import candidates
from flsim.attacks.membership.built_in import BLIND, BUILT_IN
from flsim.attacks.membership.candidates import gradient_norms, log_probabilities, moments
from flsim.data.records import Records
from flsim.models.language_model import loss_sum

ARCHITECTURES = ("cifg", "transformer")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_those_of_reading_word_by_word(architecture: str) -> None:
    """With the mean and the deviation of the log-probability of a word that the model draws there."""
    model, records = untrained(architecture), drawn(20)
    computed = log_probabilities(model, records, LAYOUT), *moments(model, records, LAYOUT)
    for record, values, means, deviations in zip(records, *computed, strict=True):
        tokens = record.tolist() + [LAYOUT.eos] * LAYOUT.ends_with_eos(len(record))
        state, log_probs = model.start(torch.tensor([[LAYOUT.bos]]))
        for place, token in enumerate(tokens):
            assert values[place] == pytest.approx(float(log_probs[0, token]), abs=1e-5)
            mean = float(log_probs.exp() @ log_probs.T)
            assert means[place] == pytest.approx(mean, abs=1e-5)
            assert deviations[place] == pytest.approx(
                float(log_probs.exp() @ (log_probs - mean).T ** 2) ** 0.5, abs=1e-4
            )
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
        one = replace(every, records=Records.from_lists([record.tolist()]), keys=[every.keys[index]])
        np.testing.assert_allclose(BUILT_IN[name].score(one)[0], whole[index], rtol=1e-4, atol=1e-6)


def test_the_blind_control_reads_no_model() -> None:
    records = drawn(10)
    one, other = (BLIND.score(before(untrained(seed=seed), records)) for seed in (0, 1))
    np.testing.assert_array_equal(one, other)
    assert one[:, 0].tolist() == [len(record) for record in records]


def test_attacks_share_arrays_that_none_of_them_can_change() -> None:
    shared = before(untrained(), drawn(5))
    for name in ("words", "lengths", "log_probs", "unigram_log_probs", "reference_log_probs", "unigram", "tokens"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(shared, name)[:] = 0
