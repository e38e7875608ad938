"""Tests compare members with the batches of training, and cover non-members, pairs, and inputs of attacks."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MakeCorpus
from hypothesis import given
from hypothesis import strategies as st
from membership.before_model import LAYOUT, before, before_two, drawn, untrained

from flsim.attacks.membership import candidates
from flsim.attacks.membership.candidates import (
    BLIND,
    BUILT_IN,
    fingerprints,
    gradient_norms,
    log_probabilities,
    matched,
    members_of,
    moments,
    targets_of,
    unigram_of,
)
from flsim.base.errors import InputError
from flsim.base.files import new_folder
from flsim.base.rng import stream
from flsim.data.corpus import Corpus, CorpusWriter
from flsim.data.records import Batch, Layout, Records, Vocabulary
from flsim.models.language_model import loss_sum
from flsim.privacy.sampling import draw_cohort
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.training.central.hparams import poisson_lot, positions_at
from flsim.training.update import local_batches

MakeRun = Callable[..., Run]
USERS, RECORDS, VOCABULARY = 20, 6, 150
LOCAL = '[training]\nrounds = 3\ncohort = 4\nsampler = "{sampler}"\n[local]\nbatch_size = 2\n'
CENTRAL = '[training]\nkind = "central"\nbatch_size = 7\nsteps = 5\n'
PRIVATE = '[privacy]\nmechanism = "dp"\nclip = 1.0\nnoise_multiplier = 1.0\n'


def apart(user: int, record: int) -> list[int]:
    """Return a text of 2 to 7 words that no other record has."""
    return [1 + user, 21 + record, *([30] * record)]


@pytest.fixture
def make_run(make_corpus: MakeCorpus, tmp_path: Path) -> MakeRun:
    """Return a function that creates an untrained run with canaries; all records of its users differ."""
    train = [[apart(user, record) for record in range(RECORDS)] for user in range(USERS)]
    others = [[[100 + user, 120 + record, *([30] * record)] for record in range(RECORDS)] for user in range(8)]

    def make(training: str, partition: str = "non-iid") -> Run:
        make_corpus(train, test=others[:4], heldout=others[4:], vocabulary_size=VOCABULARY)
        canaries = "[canaries]\np_u = [0.3]\np_e = [0.4]\ncount = 3\n"
        data = f'[data]\ncorpus = "corpus"\npartition = "{partition}"\n'
        text = f"{data}{canaries}[model]\nembedding = 4\nunits = 4\n{training}"
        (tmp_path / "run.toml").write_text(text)
        return Run.create(load(tmp_path / "run.toml"), tmp_path / "run")

    return make


def texts_of_batches(run: Run, rounds: int) -> set[tuple[int, ...]]:
    """Return the texts in the batches that training would read, including canaries."""
    layout = run.corpus.layout
    return {
        tuple(token for token in row[1:] if token not in (layout.pad, layout.eos))
        for read in batches_of(run, rounds)
        for row in np.column_stack([np.full(len(read.inputs), layout.bos), read.targets]).tolist()
    }


def batches_of(run: Run, rounds: int) -> Iterator[Batch]:
    config: object = run.config
    for round_ in range(rounds):
        training = config.training  # type: ignore[attr-defined]
        cohort = draw_cohort(run.config.seed, round_, len(run.users), training.cohort, training.sampler)
        for user in cohort.tolist():
            rng = stream(run.config.seed, "local", round_, user)
            yield from local_batches(run.users[user], run.corpus.layout, config.local, rng)  # type: ignore[attr-defined]


def texts(records: Records) -> set[tuple[int, ...]]:
    return {tuple(record.tolist()) for record in records}


@pytest.mark.parametrize("partition", ["non-iid", "iid"])
@pytest.mark.parametrize(
    "training",
    [
        LOCAL.format(sampler="fixed-size"),
        LOCAL.format(sampler="poisson"),
        LOCAL.format(sampler="with-replacement"),
        LOCAL.format(sampler="fixed-size") + "max_records = 2\nepochs = 2\n",
    ],
)
def test_members_are_the_records_in_batches_of_training(make_run: MakeRun, training: str, partition: str) -> None:
    """Members are all records in batches except canaries. A record that a canary replaced is in no batch."""
    run = make_run(training, partition)
    canaries = {tuple(canary.tokens) for canary in run.canaries}
    assert len(run.users.overlay.records) > 5
    members = texts(run.corpus.split("train").records_at(members_of(run, 3)))
    read = texts_of_batches(run, 3)
    assert members == read - canaries
    assert 0 < len(members) < USERS * RECORDS
    assert read & canaries  # else canaries replaced no record


@pytest.mark.parametrize(("partition", "private"), [("non-iid", ""), ("iid", ""), ("non-iid", PRIVATE)])
@pytest.mark.parametrize("steps", [5, 40])
def test_members_of_central_training_are_the_records_in_its_steps(
    make_run: MakeRun, partition: str, private: str, steps: int
) -> None:
    run = make_run(CENTRAL + private, partition)
    order = "iid" if partition == "iid" else "sequence"
    every, seed = USERS * RECORDS, run.config.seed
    positions = [
        poisson_lot(step, every, 7, seed) if private else positions_at(step, every, 7, order, seed)  # type: ignore[arg-type]
        for step in range(steps)
    ]
    read = texts(run.users.records_at(np.concatenate(positions)))
    members = texts(run.corpus.split("train").records_at(members_of(run, steps)))
    assert members == read - {tuple(canary.tokens) for canary in run.canaries}


def test_targets_are_members_and_non_members_of_equal_lengths(make_run: MakeRun) -> None:
    run = make_run(LOCAL.format(sampler="fixed-size"))
    targets = targets_of(run, 3, 12)
    assert targets.is_member.sum() == 12
    lengths = np.diff(targets.records.offsets)
    by_pair = {
        (pair, member): length for pair, member, length in zip(targets.pairs, targets.is_member, lengths, strict=True)
    }
    assert len(by_pair) == 24
    assert all(by_pair[pair, True] == by_pair[pair, False] for pair in range(12))
    read = texts_of_batches(run, 3)
    for record, key, author, member in zip(
        targets.records, targets.keys, targets.authors, targets.is_member, strict=True
    ):
        split, _, position = key.partition(":")
        assert run.corpus.split(split).records_at(np.array([int(position)]))[0].tolist() == record.tolist()
        assert author == f"{split}{int(position) // RECORDS}"
        assert (tuple(record.tolist()) in read) == member == (split == "train")
    assert len({*targets.keys}) == 24
    assert targets.notes[0] == "Only 12 pairs of a member and a non-member of equal length, so the intervals are wide."
    assert targets.notes[1:] == ("Members have 9 authors, and non-members 7, so the intervals can be too narrow.",)
    assert targets_of(run, 3, 12).keys == targets.keys


def write_corpus(folder: Path, splits: dict[str, dict[str, list[list[int]]]]) -> Corpus:
    """Write a corpus with these splits of users by name."""
    layout = Layout(VOCABULARY)
    words = tuple(f"w{index}" for index in range(layout.words))
    with new_folder(folder) as partial, CorpusWriter(partial, Vocabulary(words, (1,) * len(words)), layout) as writer:
        for split, users in splits.items():
            for name, records in users.items():
                writer.splits[split].add(name, Records.from_lists(records))
        writer.finish(dropped={}, sources=[], parameters={})
    return Corpus.open(folder)


def run_of(corpus: Corpus, folder: Path) -> Run:
    canaries, training = "p_u = [0.1]\np_e = [0.1]\ncount = 1", "rounds = 1\ncohort = 2"
    text = f'[data]\ncorpus = "{corpus.path}"\n[canaries]\n{canaries}\n[training]\n{training}\n'
    (folder / "run.toml").write_text(text)
    return Run.create(load(folder / "run.toml"), folder / "run")


def test_authors_of_training_are_not_non_members(tmp_path: Path) -> None:
    """Test users (authors of training in splits by date) and held-out users of training authors are excluded.

    So are texts that occur more than once, on both sides: only the first record of ann has a text of its own.
    """
    train = {"ann#0": [[1, 2], [3, 4]], "bob": [[5, 6], [3, 4]]}
    corpus = write_corpus(
        tmp_path / "corpus",
        {
            "train": train,
            "heldout": {"ann#1": [[7, 8]], "eve": [[9, 10], [5, 6], [11, 12]]},
            "test": {"bob": [[13, 14]], "dan": [[15, 16]]},
        },
    )
    targets = targets_of(run_of(corpus, tmp_path), 1, 10)
    keys = np.array(targets.keys)
    members, others = ({*keys[targets.is_member]}, {*keys[~targets.is_member]})
    assert others < {"heldout:1", "heldout:3"}  # heldout:2 has the text of a record of bob
    assert members == {"train:0"}
    assert targets.notes[0].startswith("Test users are excluded")
    assert targets.notes[1] == "4 records are excluded, because their texts occur more than once."
    equal = {"train": {"ann": [[1, 2]], "bob": [[1, 2]]}, "heldout": {"eve": [[1, 2]]}, "test": {"dan": [[3, 4]]}}
    other = write_corpus(tmp_path / "other" / "corpus", equal)
    with pytest.raises(InputError, match=r"more held-out text\. 3 records are excluded"):
        targets_of(run_of(other, tmp_path / "other"), 1, 10)


def test_a_run_without_held_out_authors_has_no_non_members_and_is_refused(tmp_path: Path) -> None:
    users = {"ann": [[1, 2], [3, 4]], "bob": [[5, 6]]}
    corpus = write_corpus(tmp_path / "corpus", {"train": users, "test": {"bob": [[13, 14]]}})
    with pytest.raises(InputError, match="no author is held out of training, so there are no non-members"):
        targets_of(run_of(corpus, tmp_path), 1, 10)


@given(st.lists(st.integers(1, 6)), st.lists(st.integers(1, 6)), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_pairs_have_equal_lengths_and_the_greatest_possible_number(
    members: list[int], others: list[int], count: int, seed: int
) -> None:
    lengths_in, lengths_out = np.array(members, np.int64), np.array(others, np.int64)
    chosen_in, chosen_out = matched(lengths_in, lengths_out, count, np.random.default_rng(seed))
    assert lengths_in[chosen_in].tolist() == lengths_out[chosen_out].tolist()
    assert (
        len({*chosen_in.tolist()})
        == len({*chosen_out.tolist()})
        == min(count, (Counter(members) & Counter(others)).total())
    )


def test_members_of_equal_length_are_drawn_with_equal_probability() -> None:
    """Four of ten records of length 3 are drawn 2,000 times. Counts are within 5 standard deviations of 800."""
    counts = np.zeros(10)
    rng = np.random.default_rng(0)
    for _ in range(2_000):
        chosen, _ = matched(np.full(10, 3), np.full(30, 3), 4, rng)
        counts[chosen] += 1
    assert (np.abs(counts - 800) < 5 * np.sqrt(2_000 * 0.4 * 0.6)).all()


def test_fingerprints_are_equal_exactly_if_texts_are(make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    users = [[rng.integers(1, 4, rng.integers(1, 6)).tolist() for _ in range(40)] for _ in range(5)]
    split = make_corpus(users).split("train")
    monkeypatch.setattr("flsim.attacks.membership.candidates.RECORDS", 40)  # the last window has no record
    numbers = np.concatenate(list(fingerprints(split))).tolist()
    every = [tuple(record) for user in users for record in user]
    assert len(numbers) == len(every)
    assert len({*numbers}) == len({*every}) == len({*zip(numbers, every, strict=True)})


def test_a_unigram_counts_words_and_ends_of_all_splits(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([[[1, 1, 2]]], test=[[[3]]], heldout=[[[1, 4]]], record_words=3)
    layout = corpus.layout
    counts = np.ones(12)
    np.add.at(counts, [1, 1, 2, 3, 1, 4, layout.eos, layout.eos], 1)  # a record of three words may have been cut
    np.testing.assert_allclose(unigram_of(corpus), np.log(counts / counts.sum()))


ARCHITECTURES = ("cifg", "transformer")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_equal_those_of_reading_word_by_word(architecture: str) -> None:
    """So do the mean and the deviation of the log-probability of a word that the model draws at each position."""
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
def test_gradient_norms_equal_those_of_single_records(architecture: str) -> None:
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
    """Scores are also equal if each record is scored by itself."""
    model, records = untrained(), drawn(12)
    whole = BUILT_IN[name].score(before_two(model, records))
    monkeypatch.setattr(candidates, "FLOATS", 700)  # at 40 words: 17 positions, which are one or two records
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


def test_attacks_share_read_only_arrays() -> None:
    shared = before(untrained(), drawn(5))
    for name in ("words", "lengths", "log_probs", "unigram_log_probs", "reference_log_probs", "unigram", "tokens"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(shared, name)[:] = 0
