"""`flsim reveal` of real runs: sums are those of training, rows follow from targets, and bad input is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import PRIVATE, Experiment, Flsim, Trained, refusal, train_here
from populations import InMemory
from scipy.stats import spearmanr
from tiny_bases import GPT2, LLAMA
from training_oracle import train_cohort

import flsim as api
from flsim.algorithms import checkpoint
from flsim.algorithms.rounds import FederatedTraining
from flsim.attacks.reveal.reveal import (
    CLIPPED,
    CUTOFF,
    NOISED,
    PLAIN,
    Guess,
    RevealHParams,
    _Round,
    blind_guess,
    flattened,
    guess_of,
    mean_prediction,
    measures_of_words,
    requests_of_users,
    sum_of_user,
    sums_by_size,
)
from flsim.base.statistics import auroc, share_interval
from flsim.data.records import Layout
from flsim.models.architectures import ModelHParams, build
from flsim.models.language_model import LoraHParams, Params, TrainableModel
from flsim.runs.folder import Run
from flsim.training.update import LocalHParams, State, clip_factor, global_norm

CLIP = ("privacy.mechanism='clip'", "privacy.clip=0.2")
DP = ("privacy.mechanism='dp'", "privacy.clip=0.2", "privacy.noise_multiplier=0.8")


def state_after(run: Run, round_: int) -> State:
    return run.load(run.path / "checkpoints" / checkpoint.checkpoint_name(round_))


@pytest.mark.parametrize("overrides", [(), ("model.architecture='transformer'", *DP)])
def test_the_sum_over_all_users_moves_the_model_as_training_did(
    trained_here: Trained, overrides: tuple[str, ...]
) -> None:
    """The sum over all users, with the noise of the run, equals the difference of two checkpoints (learning rate 1)."""
    path = trained_here("system.checkpoint_every=1", "evaluation.every=1", *overrides)
    attacked = _Round.open(path, RevealHParams(round=3))
    training, state = attacked.training, attacked.state
    parts = [sum_of_user(training, training.engine_here(), state, request) for request in attacked.requests]
    ((group, total),) = sums_by_size(parts, [len(parts)])
    *_, view = attacked._views(group, total)
    examples = sum(len(attacked.users[user]) for user in attacked.cohort.tolist())
    divisor = training.algorithm.cohort if overrides else examples
    before, after = state.params, state_after(attacked.run, 3).params
    moved = flattened({name: after[name].double() - before[name].double() for name in before})
    torch.testing.assert_close(view.vector / divisor, moved, rtol=1e-3, atol=1e-6)
    assert view.key["view"] == (NOISED if overrides else PLAIN)


def test_a_user_trains_as_in_the_reference_engine(trained_here: Trained) -> None:
    run = Run.open(trained_here(*CLIP, "local.max_records=5", "local.epochs=2", "system.engine='local'"))
    training, state = run.training(), state_after(run, 2)
    assert isinstance(training, FederatedTraining)
    model = build(run.corpus.layout.vocabulary_size, run.config.model)
    for request in requests_of_users(training, state)[:3]:
        (user,) = request.users.tolist()
        part = sum_of_user(training, training.engine_here(), state, request)
        model.load(state.params)
        for view, clip, weight in ((PLAIN, None, 5), (CLIPPED, state.clip, 1)):
            total = train_cohort(model.load(state.params), run.users, [user], training.local, run.config.seed, 2, clip)
            torch.testing.assert_close(flattened(part.updates[view]), flattened(total.delta), rtol=1e-6, atol=0)
            assert total.counts.weight == weight
        assert part.counts.sum() == total.counts.tokens
        assert part.steps[PLAIN] == 5 * 2 * 2  # weight x steps
        texts = [run.users.records_at(np.array([position]))[0].tolist() for position in part.records]
        assert len(texts) == 5
        assert all(text in [record.tolist() for record in run.users[user]] for text in texts)


def test_sums_are_of_disjoint_users_in_order(trained_here: Trained) -> None:
    run = Run.open(trained_here())
    training, state = run.training(), state_after(run, 2)
    assert isinstance(training, FederatedTraining)
    parts = [sum_of_user(training, training.engine_here(), state, one) for one in requests_of_users(training, state)]
    found = dict(sums_by_size(parts, [1, 2, 6]))
    assert [*found] == [(1, 0), (1, 1), (2, 0), (1, 2), (1, 3), (2, 1), (1, 4), (2, 2), (6, 0)]
    for (size, number), total in found.items():
        members = parts[size * number : size * (number + 1)]
        expected = sum(flattened(part.updates[PLAIN]).double() for part in members)
        torch.testing.assert_close(flattened(total.updates[PLAIN]).double(), expected, rtol=1e-5, atol=1e-6)
        assert (total.counts == sum(part.counts for part in members)).all()


def test_rows_follow_from_targets(trained_here: Trained, flsim: Flsim, tmp_path: Path) -> None:
    run = trained_here(*DP)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.rglob("*"))
    figure = tmp_path / "reveal.svg"
    options = ("--round", 3, "--records", 12, "--references", 99, "--noise", 0.05)
    code, out, error = flsim("reveal", run, *options, "--out", figure, "--json")
    assert code == 0, error
    assert figure.stat().st_size > 10_000
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    printed = json.loads(out)
    frame, every = (pd.DataFrame(printed[name]) for name in ("rows", "targets"))
    views = [(PLAIN, None), (CLIPPED, None), (NOISED, 0.05), (NOISED, 0.8)]
    assert {(row["view"], row["noise_multiplier"]) for row in printed["rows"]} == {*views}
    assert frame["users"].unique().tolist() == [1, 6]
    for row in frame[frame["subject"] == "record"].to_dict("records"):
        targets = every[every["subject"] == "record"]
        for name in ("users", "view", "noise_multiplier"):
            targets = targets[targets[name].isna() if pd.isna(row[name]) else targets[name] == row[name]]
        inside = targets[targets["is_inside"]]
        assert (row["n_in"], row["n_out"]) == (len(inside), len(targets) - len(inside))
        small = int((inside["p"] <= 0.05).sum())
        assert row["tpr_at_0.05"] == small / len(inside)
        assert (row["tpr_low_at_0.05"], row["tpr_high_at_0.05"]) == share_interval(small, len(inside))
        areas = [
            auroc(*(group[group["is_inside"] == side]["score"].to_numpy() for side in (True, False)))
            for _, group in targets.groupby("group")
            if group["is_inside"].any()  # all records of a user can be canaries
        ]
        assert row["auroc"] == pytest.approx(np.mean(areas))
        assert pd.isna(row["allowed_at_0.05"]) == (row["view"] != NOISED)
    np.testing.assert_allclose(every["p"] * (every["references"] + 1), every["rank"])


def test_noise_hides_what_a_sum_reveals(trained_here: Trained) -> None:
    revealed = api.reveal(trained_here(*CLIP), round=1, records=20, noise=[1e3])
    rows = revealed.frame[revealed.frame["users"] == 1].to_dict("records")
    found = {(row["subject"], row["view"]): row for row in rows}
    clipped, records = found["words", CLIPPED], found["record", CLIPPED]
    assert clipped["auroc"] == pytest.approx(1)
    assert clipped["precision"] == 1
    assert clipped["permuted_auroc"] < 0.7
    assert found["words", NOISED]["auroc"] < 0.7
    assert records["tpr_at_0.05"] > 3 * records["fpr_at_0.05"]


def test_a_private_run_with_every_part_of_a_state_is_attacked(trained_here: Trained) -> None:
    """The clip is adaptive, so noise on updates has a larger multiplier; cohort sizes vary; the server has Adam."""
    revealed = api.reveal(trained_here(*PRIVATE), round=3)
    noised = revealed.frame[revealed.frame["view"] == NOISED]
    assert noised["noise_multiplier"].unique() == pytest.approx((0.8**-2 - 4.0**-2) ** -0.5)


def test_adapters_of_a_hugging_face_model_are_attacked_without_words(experiment: Experiment) -> None:
    settings = [f"model.config.{name}={json.dumps(value)}" for name, value in GPT2.items()]
    config = experiment.config.read_text().replace("embedding = 8\nunits = 12", 'architecture = "hf"')
    experiment.config.write_text(config)
    changes = ("model.lora.rank=2", "model.config.n_positions=20", "training.rounds=2", "local.max_records=3")
    revealed = api.reveal(train_here(experiment, [*settings, *changes]), records=3, references=19)
    assert set(revealed.frame["subject"]) == {"record", "canary"}
    assert any("Words cannot be read" in note for note in revealed.notes)


def test_one_line_names_the_rounds_that_have_a_checkpoint(experiment: Experiment, flsim: Flsim) -> None:
    run = train_here(experiment, ["system.checkpoint_every=4", "evaluation.every=2"])
    assert refusal(flsim, "reveal", run, "--round", 2).endswith("rounds that can be attacked: 1, 3")
    assert flsim("reveal", run, "--round", 5)[0] == 2
    assert api.reveal(run, records=1, references=1).frame["round"].unique() == [3]


def test_unusable_noise_multipliers_are_refused(trained_here: Trained, flsim: Flsim) -> None:
    assert "has no clip" in refusal(flsim, "reveal", trained_here(), "--noise", 1)
    with pytest.raises(api.InputError, match="noise must be 0, or between"):
        api.reveal("run", noise=[1e-300])


VOCABULARY, ETA = 30, 0.1
LAYOUT = Layout(VOCABULARY, 8)
TEXTS = [[[1, 2, 3], [3, 3, 4, 5]], [[6, 7], [2, 8, 9, 10, 11]]]
USERS = InMemory(LAYOUT, TEXTS)
NOTHING = torch.zeros(VOCABULARY, dtype=torch.float64)


def model_of(architecture: str, **settings: object) -> TrainableModel:
    sizes = {"embedding": 8, "units": 12, "heads": 2 if architecture == "transformer" else 4}
    settings |= {} if architecture == "hf" else sizes
    return build(VOCABULARY, ModelHParams(architecture=architecture, **settings)).initialize(0)  # type: ignore[arg-type]


def update_of(model: TrainableModel, user: int, **hparams: object) -> Params:
    """Return the update of a user in plain PyTorch, with a weight of 1 instead of its number of records."""
    total = train_cohort(model, USERS, [user], LocalHParams(learning_rate=ETA, **hparams), 0, 0)  # type: ignore[arg-type]
    return {name: value / total.counts.weight for name, value in total.delta.items()}


def counts_of(user: int) -> np.ndarray:
    counts = np.zeros(VOCABULARY, np.int64)
    for record in TEXTS[user]:
        for token in [*record, LAYOUT.eos]:
            counts[token] += 1
    return counts


@pytest.mark.parametrize("architecture", ["cifg", "lstm", "gru", "transformer", "convolutional"])
def test_one_step_reveals_each_count_exactly(architecture: str) -> None:
    """The counts are n = T (Delta b / eta + p), with the model's own prediction p on the user's text."""
    model, counts = model_of(architecture).double(), counts_of(0)
    update = update_of(model, 0, batch_size=2)
    guess = guess_of(model, update, ETA, mean_prediction(model, USERS[0], LAYOUT))
    assert guess is not None
    np.testing.assert_allclose(counts.sum() * guess.scores, counts, atol=1e-5)
    assert (guess.chosen <= (counts > 0)).all()
    assert guess.chosen.sum() == (counts > 0).sum()  # each p of an untrained model is below 1 / T


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_no_number_of_steps_raises_the_bias_of_an_absent_word(optimizer: str) -> None:
    model = model_of("cifg")
    for users in ([0], [1], [0, 1]):
        parts = [update_of(model, user, batch_size=1, epochs=3, optimizer=optimizer) for user in users]
        total = {name: sum((2.0 + place) * part[name] for place, part in enumerate(parts)) for name in parts[0]}
        guess = guess_of(model, total, ETA, NOTHING)  # type: ignore[arg-type]
        assert guess is not None
        assert guess.chosen.any()
        assert (guess.chosen <= (sum(map(counts_of, users)) > 0)).all()


def test_a_clip_changes_nothing_for_an_attacker_who_knows_its_factor() -> None:
    model, predicted = model_of("cifg"), mean_prediction(model_of("cifg"), USERS[1], LAYOUT)
    update = update_of(model, 0, batch_size=1)
    factor = clip_factor(global_norm(update), 0.01)
    assert factor < 1
    plain = guess_of(model, update, 4 * ETA, predicted)
    clipped = guess_of(model, {name: factor * value for name, value in update.items()}, factor * 4 * ETA, predicted)
    assert plain is not None
    assert clipped is not None
    np.testing.assert_allclose(plain.scores, clipped.scores, rtol=1e-9)
    np.testing.assert_array_equal(plain.chosen, clipped.chosen)


def test_of_untied_embeddings_exactly_the_rows_of_input_words_change() -> None:
    model = model_of("hf", config=LLAMA | {"tie_word_embeddings": False})
    guess = guess_of(model, update_of(model, 1, batch_size=1), ETA, NOTHING)
    assert guess is not None
    read = {LAYOUT.bos} | {word for record in TEXTS[1] for word in record}  # the model reads the first position of PAD
    assert set(np.flatnonzero(guess.chosen).tolist()) - {LAYOUT.pad} == read


def test_rows_of_tied_embeddings_are_cut_as_in_breaching() -> None:
    """Expected: token_strategy "embedding-norm" in NumPy, log-norms above mean + cutoff x standard deviation."""
    model = model_of("hf", config=GPT2)
    update = update_of(model, 1, batch_size=1)
    (name,) = (name for name, value in model.trainable.items() if value.shape[0] == VOCABULARY)
    norms = np.linalg.norm(update[name].numpy(), axis=1)
    expected = np.log(norms) > np.log(norms).mean() + CUTOFF * np.log(norms).std(ddof=1)
    guess = guess_of(model, update, ETA, NOTHING)
    assert guess is not None
    np.testing.assert_allclose(guess.scores, norms)
    np.testing.assert_array_equal(guess.chosen, expected)
    assert expected.any()


def test_adapters_on_a_frozen_base_have_no_rows_of_words() -> None:
    model = model_of("hf", config=GPT2, lora=LoraHParams(rank=2))
    assert guess_of(model, update_of(model, 0), ETA, NOTHING) is None


def test_measures_of_words_equal_their_definitions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, counts = rng.integers(0, 6, 12).astype(float), rng.integers(0, 3, 12)
        chosen, among = rng.random(12) < 0.5, rng.random(12) < 0.8
        found = measures_of_words(Guess(scores, chosen), counts, among)
        inside = [place for place in range(12) if among[place]]
        present = {place for place in inside if counts[place]}
        guessed = {place for place in inside if chosen[place]}
        pairs = [
            (scores[one] > scores[other]) + (scores[one] == scores[other]) / 2
            for one in present
            for other in set(inside) - present
        ]
        assert found["auroc"] == pytest.approx(np.mean(pairs) if pairs else math.nan, nan_ok=True)
        for name, group in (("precision", guessed), ("recall", present)):
            assert found[name] == pytest.approx(len(guessed & present) / len(group) if group else math.nan, nan_ok=True)
        spread = np.ptp(scores[among]) * np.ptp(counts[among])
        expected = spearmanr(scores[among], counts[among]).statistic if spread else math.nan
        assert found["spearman"] == pytest.approx(expected, nan_ok=True)


def test_the_blind_guess_has_the_most_frequent_words_in_the_same_number() -> None:
    guess = blind_guess(np.log(np.array([0.1, 0.4, 0.2, 0.3])), np.array([True, False, False, True]))
    assert guess.chosen.tolist() == [False, True, False, True]
