"""Records in sums: alignments against autograd, candidates, and false alarms of records outside the cohort."""

import numpy as np
import pytest
import scipy
import torch
from helpers import Trained
from populations import InMemory
from training_oracle import train_cohort

from flsim.attacks.audit.bounds import p_values, ranks_among
from flsim.attacks.reveal.reveal import alignments, flattened, record_candidates
from flsim.data.records import Layout, Records
from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import loss_sum
from flsim.runs.folder import Run
from flsim.training.update import LocalHParams

LAYOUT = Layout(30, 8)
RECORDS = Records.from_lists([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4]])


@pytest.mark.parametrize("architecture", ["cifg", "transformer"])
def test_an_alignment_is_the_cosine_with_the_gradient_of_one_record(architecture: str) -> None:
    heads = 2 if architecture == "transformer" else 4
    model = build(30, ModelHParams(architecture=architecture, embedding=8, units=12, heads=heads)).initialize(0)
    vectors = torch.from_numpy(
        np.random.default_rng(0).normal(size=(sum(p.numel() for p in model.trainable.values()), 3))
    )
    found = alignments(model, RECORDS, LAYOUT, vectors.float())
    for place, record in enumerate(RECORDS.offsets[:-1]):
        words = RECORDS.tokens[record : RECORDS.offsets[place + 1]].tolist()
        targets = torch.tensor([[*words, LAYOUT.eos][: LAYOUT.record_words]])
        inputs = torch.tensor([[LAYOUT.bos, *words][: targets.shape[1]]])
        loss, count = loss_sum(model, inputs, targets)
        gradients = torch.autograd.grad(loss / count, list(model.trainable.values()))
        vector = -flattened(dict(zip(model.trainable, gradients, strict=True))).double()
        for column in range(3):
            expected = torch.cosine_similarity(vector, vectors[:, column], dim=0)
            assert found[place, column] == pytest.approx(float(expected), abs=1e-5)


def test_the_record_of_a_sum_of_one_step_has_the_smallest_p_value() -> None:
    """The update is a multiple of the record's negative gradient, so the cosine is 1."""
    model = build(30, ModelHParams(architecture="cifg", embedding=8, units=12)).initialize(0)
    total = train_cohort(model, InMemory(LAYOUT, [[[1, 2, 3]]]), [0], LocalHParams(learning_rate=0.01), 0, 0)
    scores = alignments(model, RECORDS, LAYOUT, flattened(total.delta)[:, None])[:, 0]
    assert scores[0] == pytest.approx(1, abs=1e-4)
    assert p_values(ranks_among(scores[:1], scores[1:]), 3).tolist() == [1 / 4]


def test_records_outside_the_cohort_raise_false_alarms_at_the_level(trained_here: Trained) -> None:
    """In 100 draws of one candidate and 9 references, each p-value k / 10 is equally likely."""
    run = Run.open(trained_here())
    users, state = run.users, run.training().first_state()
    cohort = np.arange(6)
    model = build(run.corpus.layout.vocabulary_size, run.config.model).load(state.params)
    total = train_cohort(model, users, cohort.tolist(), LocalHParams(learning_rate=0.3), 0, 0)
    sums = {(6, 0): np.arange(users.user_offsets[6])}
    ranks = []
    for draw in range(100):
        one = record_candidates(users, cohort, sums, 1, 9, np.random.default_rng(draw))
        scores = alignments(model, one.texts, users.layout, flattened(total.delta)[:, None])[:, 0]
        (outside,) = one.outside[6, 0].tolist()
        ranks.append(int(ranks_among(scores[[outside]], scores[len(one.names) :])[0]))
    assert scipy.stats.chisquare(np.bincount(ranks, minlength=11)[1:]).pvalue > 0.01


def test_candidates_are_records_of_the_sum_and_of_users_outside_the_cohort(trained_here: Trained) -> None:
    run = Run.open(trained_here("data.partition='iid'"))
    users, cohort = run.users, np.array([1, 5, 9])
    sums = {(1, 0): np.arange(*users.user_offsets[[1, 2]]), (2, 0): np.arange(*users.user_offsets[[5, 6]])}
    one = record_candidates(users, cohort, sums, 4, 30, np.random.default_rng(0))
    every = [record.tolist() for record in one.texts]
    in_cohort = [record.tolist() for user in cohort.tolist() for record in users[user]]
    in_corpus = run.corpus.split("train")
    for group, user in (((1, 0), 1), ((2, 0), 5)):
        assert len(one.inside[group]) == 4
        assert all(every[row] in [record.tolist() for record in users[user]] for row in one.inside[group])
        assert not any(every[row] in in_cohort for row in one.outside[group])
    assert len(every) - len(one.names) == 30
    assert not any(text in in_cohort for text in every[len(one.names) :])
    for name, text in zip(one.names, every, strict=False):
        assert in_corpus.records_at(np.array([int(name.removeprefix("train:"))]))[0].tolist() == text
    phrases = {tuple(canary.tokens) for canary in run.canaries}
    assert not phrases & set(map(tuple, every))
