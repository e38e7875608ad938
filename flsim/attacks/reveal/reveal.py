"""`flsim reveal`: the words and records that a round's updates reveal, by cohort size, clip and noise."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import pandas as pd
import scipy
import torch
from torch import Tensor

from flsim.algorithms import checkpoint
from flsim.algorithms.rounds import Engine, FederatedTraining
from flsim.algorithms.summation import RoundRequest
from flsim.attacks.audit.bounds import detections_by_level, gaussian, p_values, ranks_among
from flsim.attacks.membership.candidates import gradients_of, unigram_of
from flsim.attacks.membership.inference import column
from flsim.attacks.result import Result
from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError, as_list
from flsim.base.machine import refuse_missing_device
from flsim.base.progress import tracked
from flsim.base.rng import stream
from flsim.base.settings import DIFFERENT, Count, Positive, settings
from flsim.base.statistics import auroc, t_interval
from flsim.canaries.population import Population
from flsim.canaries.spec import Canary
from flsim.data.corpus import in_whole
from flsim.data.records import Layout, Records, batch, batches_by_length
from flsim.measures.memorization.score import references as random_phrases
from flsim.models.language_model import Params, TrainableModel
from flsim.privacy import noise
from flsim.privacy.ledger import check_noise_multiplier
from flsim.results.sweeps import over_runs
from flsim.runs.config.custom_code import TRAINED, announce
from flsim.runs.folder import Run
from flsim.show.table import json_rows
from flsim.training.update import State, clip_factor, epoch_orders, global_norm, local_batches
from flsim.training.update import threads as threads_of_torch

# The bag of words of an update: which words the users trained on, and how often.
#
# A step of SGD at learning rate eta, on the mean loss over T tokens, changes the output bias of token v by
#
#     Delta b_v = -eta (p_v - n_v / T),
#
# with p the mean probability that the model predicts, and n_v the number of targets v. Therefore only a token that
# occurs can have a positive change. This holds for any number of steps, sums with positive weights, and after a clip.
# For s steps, n_v / T = Delta b_v / eta + p_v with s eta is a first-order approximation.
#
# Without an output bias, the norms of the rows of the input embedding are the scores: `recover_token_information` of
# Geiping's breaching (https://github.com/JonasGeiping/breaching), "decoder-bias" and "embedding-norm".

CUTOFF = 1.5  # breaching's: standard deviations above the mean of log-norms, if all rows change
FLOATS = 2**22  # values of logits in one batch


@dataclass(frozen=True)
class Guess:
    """An attacker's guess of the words of a sum: scores [V], higher for more frequent tokens, and chosen tokens [V]."""

    scores: Floats
    chosen: Flags

    def permuted(self, order: Ints) -> "Guess":
        """Return the guess with the token ids exchanged: int64 [V], a permutation."""
        return Guess(self.scores[order], self.chosen[order])


def guess_of(model: TrainableModel, total: Params, rate: float, predicted: Tensor) -> Guess | None:
    """Return the words that a sum of updates reveals; None if it has no row of a token.

    `rate` is the learning rate times the steps, summed over users; `predicted` the model's mean probability [V].
    """
    bias, rows = model.rows_of_tokens(total)
    if bias is not None:
        return Guess((bias / rate + predicted).numpy(), (bias > 0).numpy())
    if rows is None:
        return None
    norms = rows.norm(dim=1)
    deviation, mean = torch.std_mean(norms.log())
    cutoff = mean + CUTOFF * deviation  # not finite if some rows do not change
    chosen = norms.log() > cutoff if cutoff.isfinite() else norms > 0
    return Guess(norms.numpy(), chosen.numpy())


def blind_guess(log_probs: Floats, chosen: Flags) -> Guess:
    """Return the guess without an update: the most frequent tokens, as many as another guess has."""
    most_frequent = np.zeros(len(log_probs), bool)
    most_frequent[np.argsort(-log_probs, kind="stable")[: chosen.sum()]] = True
    return Guess(log_probs, most_frequent)


def measures_of_words(guess: Guess, counts: Ints, among: Flags) -> dict[str, float]:
    """Return how well a guess agrees with the words of users; NaN for values that are not defined.

    `counts` has the number of each token among the targets, and `among` the measured tokens, [V] each. ``spearman`` is
    the rank correlation of scores and counts; ``precision`` and ``recall`` are of the set of guessed tokens.
    """
    scores, chosen, counts = guess.scores[among], guess.chosen[among], counts[among]
    occurs = counts > 0
    hits = int((chosen & occurs).sum())
    is_constant = not len(counts) or np.ptp(counts) == 0 or np.ptp(scores) == 0
    return {
        "auroc": auroc(scores[occurs], scores[~occurs]) if 0 < occurs.sum() < len(occurs) else math.nan,
        "precision": hits / chosen.sum() if chosen.any() else math.nan,
        "recall": hits / occurs.sum() if occurs.any() else math.nan,
        "spearman": math.nan if is_constant else float(scipy.stats.spearmanr(scores, counts).statistic),
    }


@torch.no_grad()
def mean_prediction(model: TrainableModel, records: Records, layout: Layout) -> Tensor:
    """Return the mean probability of each token over all positions of records, float64 [V]."""
    total, positions = torch.zeros(layout.vocabulary_size, dtype=torch.float64), 0
    for rows in batches_by_length(records, layout, FLOATS // layout.vocabulary_size):
        read = batch(records, rows, layout)
        inputs, targets = (torch.from_numpy(side).to(model.device) for side in (read.inputs, read.targets))
        real = targets != layout.pad
        total += model.logits_at(inputs, real).double().softmax(-1).sum(0).cpu()
        positions += int(real.sum())
    return total / max(positions, 1)


# Sums of updates over users of a cohort, and whether a record is in a sum.


PLAIN, CLIPPED, NOISED = "plain", "clipped", "noised"
GROUPS = 5  # largest number of sums of one size


@dataclass(frozen=True)
class CohortSum:
    """The sums over some users of a cohort, and their training data."""

    # by view: the sum of updates, float64 by parameter. "plain" weights updates as training without a clip does;
    # "clipped" sums clipped updates, and is missing without a clip
    updates: dict[str, Params]
    steps: dict[str, float]  # by view: sum over users of the number of local steps times the weight in the sum
    counts: Ints  # int64 [V], number of each token among the targets of all steps
    records: Ints  # int64 [n], records that users trained on, as positions in the order of the population

    def __add__(self, other: "CohortSum") -> "CohortSum":
        return CohortSum(
            {view: {name: value + other.updates[view][name] for name, value in total.items()}
             for view, total in self.updates.items()},
            {view: steps + other.steps[view] for view, steps in self.steps.items()},
            self.counts + other.counts,
            np.concatenate([self.records, other.records]),
        )  # fmt: skip


def requests_of_users(training: FederatedTraining, state: State) -> list[RoundRequest]:
    """Return the requests of a round with one user each, without a clip, in a random order."""
    requests = [
        replace(request, users=request.users[place : place + 1], clip=None, oldest_resumable_round=state.round)
        for request in training.requests(state)
        for place in range(len(request.users))
    ]
    order = stream(training.seed, "order of revealed users", state.round).permutation(len(requests))
    return [requests[place] for place in order]


def sum_of_user(training: FederatedTraining, engine: Engine, state: State, request: RoundRequest) -> CohortSum:
    """Train the user of a request as in the run, and return the user's part of a sum, or raise Diverged."""
    population, (user,) = population_of(training, state), request.users.tolist()
    total = training.update(engine, request)
    total.refuse_divergence(f"round {state.round + 1}", population.layout.vocabulary_size)
    plain, weight = {name: total.delta[name] for name in state.params}, total.counts.weight
    part = data_of_user(training, state, user)
    factors = {PLAIN: 1.0}
    if state.clip is not None:
        per_user = 1 / weight if weight else 0.0
        factors[CLIPPED] = per_user * clip_factor(per_user * global_norm(plain), state.clip)
    return replace(
        part,
        updates={view: {name: factor * value for name, value in plain.items()} for view, factor in factors.items()},
        steps={view: factor * weight * part.steps[PLAIN] for view, factor in factors.items()},
    )


def data_of_user(training: FederatedTraining, state: State, user: int) -> CohortSum:
    """Return the training data of a user in the round after `state`: steps, counts and records, without an update."""
    population, hparams = population_of(training, state), training.local
    records, layout = population[user], population.layout
    keys = training.seed, "local", state.round, user
    targets = [batch.targets.ravel() for batch in local_batches(records, layout, hparams, stream(*keys))]
    counts = np.bincount(np.concatenate([*targets, np.empty(0, np.int64)]), minlength=layout.vocabulary_size)
    counts[layout.pad] = 0
    chosen = epoch_orders(len(records), hparams, stream(*keys))[0]
    return CohortSum({}, {PLAIN: len(targets)}, counts, positions_of(population, user)[chosen])


def positions_of(users: Population, user: int) -> Ints:
    """Return the positions of a user's records in the order of the population; those of pseudo-users follow."""
    if user >= len(users):
        return users.records + users.extra.records_of(np.array([user - len(users)]))
    return np.arange(*users.user_offsets[user : user + 2])


def population_of(training: FederatedTraining, state: State) -> Population:
    """Return the users with their records in the round after `state`."""
    return cast(Population, training.users.at(state.round))  # training of a run


def sums_by_size(parts: Iterable[CohortSum], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], CohortSum]]:
    """Yield ((size, number), sum) for consecutive users, for each size at most `GROUPS` disjoint sums."""
    running, numbers = dict[int, CohortSum](), dict.fromkeys(sizes, 0)
    for users, part in enumerate(parts, 1):
        for size in sizes:
            if numbers[size] == GROUPS:
                continue
            running[size] = running[size] + part if size in running else part
            if users % size == 0:
                yield (size, numbers[size]), running.pop(size)
                numbers[size] += 1


def flattened(tensors: Params) -> Tensor:
    """Return all tensors as one vector [P], float32, in the order of their names."""
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


# Whether a record is in a sum of updates: the alignment of the sum with the record's gradient, and exact p-values.
#
# The score of a record x is the cosine of the sum and -grad loss(x), at the model before the round. K references have
# the distribution of a record that is not in the sum, and are independent of the sum. Therefore
#
#     p = (1 + #{references that score at least as high}) / (K + 1)
#
# is at most alpha with probability at most alpha if the record is not in the sum.
#
# - Records: one random sample, without replacement, has the references and the records that are not in the sum: those
#   of users outside the cohort, except texts that also occur in the cohort.
# - Canaries of random words: references are other random words, exact for a canary that no round has used so far.

Group = tuple[int, int]  # number of users of a sum, and number of the sum
SAMPLED = 10**6  # records from which those outside the cohort are drawn
RECORD, CANARY = "record", "canary"


@dataclass(frozen=True)
class Texts:
    """N named candidates of one kind, then K references, and which candidates are inside and outside of sums."""

    kind: str
    texts: Records
    names: Sequence[str]
    inside: Mapping[Group, Ints]
    outside: Mapping[Group, Ints]


def record_candidates(
    users: Population, cohort: Ints, sums: Mapping[Group, Ints], count: int, references: int, rng: np.random.Generator
) -> Texts:
    """Draw at most `count` records inside each sum, and as many records and the references of users outside the cohort.

    `sums` has the positions of the records that the users of each sum trained on, int64 [n].
    """
    of_corpus = (
        np.setdiff1d(positions[positions < users.records], users.overlay.records) for positions in sums.values()
    )
    inside = [rng.choice(positions, min(count, len(positions)), replace=False) for positions in of_corpus]
    others = _outside(users, cohort, count + references, rng)
    number = min(count, len(others) // 2)
    every, place = np.unique(np.concatenate([*inside, others[:number]]), return_inverse=True)
    *places, outside = np.split(place, np.cumsum([len(positions) for positions in inside]))
    names = in_whole(users.split, every if users.twin is None else users.twin.order[every])
    return Texts(
        RECORD,
        Records.joined([users.records_at(every), users.records_at(others[number:])]),
        [f"train:{name}" for name in names.tolist()],
        dict(zip(sums, places, strict=True)),
        dict.fromkeys(sums, outside),
    )


def canary_candidates(
    users: Population, canaries: Sequence[Canary], sums: Mapping[Group, Ints], references: int, seed: int
) -> Texts:
    """Return all canaries, whose words are random, with other random words as references; see `record_candidates`."""
    owners = np.concatenate([users.overlay.canaries, users.injected])
    positions = np.concatenate([users.overlay.records, users.records + np.arange(len(users.injected))])
    inside = {group: np.unique(owners[np.isin(positions, of_sum)]).astype(np.int64) for group, of_sum in sums.items()}
    texts = [list(canary.tokens) for canary in canaries]
    drawn = random_phrases(seed, references, len(texts[0]), users.layout).tolist()
    return Texts(
        CANARY,
        Records.from_lists(texts + drawn),
        [canary.id for canary in canaries],
        inside,
        {group: np.setdiff1d(np.arange(len(texts)), of_sum) for group, of_sum in inside.items()},
    )


def alignments(model: TrainableModel, records: Records, layout: Layout, sums: Tensor) -> Floats:
    """Return the cosine of each sum [P, sums] and the negative gradient of each record, float64 [N, sums]."""
    cosines, lengths = np.zeros((len(records), sums.shape[1])), sums.double().norm(dim=0)
    for rows, gradients in gradients_of(model, records, layout):
        flat = torch.cat([gradients[name].flatten(1) for name in sorted(gradients)], dim=1).cpu()
        norms = flat.double().norm(dim=1, keepdim=True) * lengths
        cosines[rows] = (-(flat @ sums).double() / norms).masked_fill(norms == 0, 0.0).numpy()
    return cosines


def _outside(users: Population, cohort: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Draw positions of records of users outside the cohort, whose texts do not occur in the cohort [at most count]."""
    positions = rng.choice(users.records, min(users.records, SAMPLED), replace=False)
    owners = users.user_offsets.searchsorted(positions, side="right") - 1
    positions = positions[~np.isin(owners, cohort) & ~np.isin(positions, users.overlay.records)]
    known = {record.tobytes() for user in np.unique(cohort).tolist() for record in users[user]}
    texts = ((position, users.records_at(np.array([position]))[0].tobytes()) for position in positions.tolist())
    return np.fromiter(islice((position for position, text in texts if text not in known), count), np.int64)


# `flsim reveal`: settings, and the rows of a round.

SIZES = (1, 10, 100)  # users of a sum, and all users of the cohort
RARE = 10  # largest number of users of a rare word
PUBLIC = 500  # records of test users with which predictions are averaged
LEVELS = (0.01, 0.05)  # false-positive rates
KEY = ["users", "view", "noise_multiplier"]
WORDS, RARE_WORDS = "words", "rare words"
FEWEST = 3  # sums of an interval
LISTED = 20  # rounds in an error message
NO_ROWS = (
    "Words cannot be read from this update: it changes neither an output bias nor an input embedding, such as that of "
    "LoRA adapters on a frozen base. The test of records uses all weights that are trained."
)
NO_CANARIES = 'Canaries are tested only if their words are random (canaries.source = "words").'
FEW = (
    "Users outside the cohort have few records: a test of records has only {:,} references, so no p-value is below "
    "1 / (references + 1)."
)


@settings
class RevealHParams:
    """Settings of an attack on the updates of a round; see `reveal`."""

    round: Count | None = None
    records: Count = 100
    references: Count = 999
    noise: Annotated[tuple[Positive, ...], DIFFERENT] = ()
    device: str = "cpu"

    def __post_init__(self) -> None:
        refuse_missing_device(self.device)
        for multiplier in self.noise:
            check_noise_multiplier(multiplier, "noise")


@dataclass(frozen=True, eq=False, kw_only=True)
class Revealed(Result):
    """The result of `flsim reveal`.

    Attributes:
        frame: a row for each size of a sum, view ("plain", "clipped", "noised") and subject: "words", "rare words" (of
            at most `RARE` training users), "record", "canary". Values are means over the sums of this size.
        targets: a row for each tested record or canary and sum: subject, name, users, group (number of the sum), view,
            noise_multiplier, is_inside, score, blind_score, rank, references and p.
    """

    targets: pd.DataFrame

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"targets": json_rows(self.targets)}


def reveal(
    *runs: Path | str,
    round: int | None = None,
    records: int = 100,
    references: int = 999,
    noise: Sequence[float] = (),
    device: str = "cpu",
) -> Revealed:
    """Measure what the updates of a round reveal about its users, like `flsim reveal`.

    The users of the round are trained again, which takes as long as the round. A custom part of the run is executed.

    Args:
        runs: run folders and folders of sweeps.
        round: the round, from 1, which needs the checkpoint before it; by default the last such round of each run.
        records: largest number of tested records inside each sum, and outside.
        references: largest number of references, K; the smallest p-value is 1 / (K + 1).
        noise: noise multipliers of further sums, for a run with a clip.
        device: torch device, such as "cuda".

    Raises:
        InputError: a run is central, has no clip for `noise`, or no checkpoint before the round.

    Examples:
        >>> revealed = flsim.reveal("runs/demo/non-iid", round=41)             # doctest: +SKIP
        >>> revealed.targets.query("is_inside").groupby("users")["p"].median() # doctest: +SKIP
    """
    hparams = RevealHParams(round, records, references, tuple(as_list("noise", noise)), device)
    results = over_runs(runs, lambda path: _Round.open(path, hparams).revealed()).values()
    return Revealed(
        frame=pd.concat([result.frame for result in results], ignore_index=True),
        targets=pd.concat([result.targets for result in results], ignore_index=True),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


@dataclass(frozen=True)
class _View:
    group: Group  # the number of users of the sum, and the number of the sum
    key: dict[str, Any]  # users, view and noise_multiplier of a row
    guess: Guess | None  # the guessed words; None if the sum does not reveal words
    vector: Tensor  # float32 [P], the sum


@dataclass(frozen=True)
class _Round:
    run: Run
    hparams: RevealHParams
    training: FederatedTraining
    state: State
    model: TrainableModel
    users: Population
    cohort: Ints  # different users of the round
    requests: list[RoundRequest]
    unigram: Floats

    @classmethod
    def open(cls, path: Path, hparams: RevealHParams) -> "_Round":
        run = Run.open(path)
        if run.config.unit != "user":
            raise InputError(f"{path}: training is central, so no user sends an update; name a federated run")
        if hparams.noise and run.config.privacy.clip is None:
            raise InputError(
                f"--noise {hparams.noise[0]:g}: {path} has no clip, which noise multipliers refer to; remove --noise, "
                'or train with privacy.mechanism "clip"'
            )
        saved = _checkpoint_before(run, hparams.round)
        announce(run.config, *TRAINED)
        training = cast(FederatedTraining, run.training(hparams.device))
        state = training.first_state() if saved is None else run.load(saved)
        requests = requests_of_users(training, state)
        if not requests:
            raise InputError(f"{path}: no user takes part in round {state.round + 1:,}; name another --round")
        model = checkpoint.model_of(run.provenance).load(state.params).to(torch.device(hparams.device))
        users, cohort = population_of(training, state), np.unique(training.cohort(state.round))
        return cls(run, hparams, training, state, model, users, cohort, requests, unigram_of(run.corpus))

    def revealed(self) -> Revealed:
        engine, views, data = self.training.engine_here(), list[_View](), dict[Group, CohortSum]()
        parts = (
            sum_of_user(self.training, engine, self.state, request)
            for request in tracked(f"{self.run.name}: training users", self.requests, "users")
        )
        with threads_of_torch(self.run.config.system.training_threads):
            for group, part in sums_by_size(parts, self._sizes):
                views += self._views(group, part)
                data[group] = replace(part, updates={})
            rows, targets = self._word_rows(views, data), self._targets(views, data)
        named: dict[str, Any] = {"run": str(self.run.path), "setting": self.run.setting, "seed": self.run.config.seed}
        named |= {"round": self.state.round + 1}
        rows += _record_rows(targets, self.run.config.privacy.noise == "independent")
        return Revealed(
            frame=pd.DataFrame([named | row for row in rows]),
            targets=targets.assign(**named),
            notes=tuple(self._notes(views, int(targets["references"].min()))),
        )

    def _notes(self, views: Sequence[_View], references: int) -> Iterator[str]:
        if not any(view.guess for view in views):
            yield NO_ROWS
        if self.run.config.canaries.source != "words":
            yield NO_CANARIES
        if references < self.hparams.references:
            yield FEW.format(references)

    @cached_property
    def _sizes(self) -> list[int]:
        users = len(self.requests)
        return [*(size for size in SIZES if size < users), users]

    def _views(self, group: Group, part: CohortSum) -> Iterator[_View]:
        """Yield a sum plain, clipped, and with noise, as far as the run has a clip and noise."""
        rate = self.training.local.rate(self.state.round, self.training.length)

        def view(name: str, multiplier: float, total: Params, steps: float) -> _View:
            guess = guess_of(self.model, total, rate * steps or 1.0, self._predicted)  # 0 steps: no record
            return _View(group, dict(zip(KEY, (group[0], name, multiplier), strict=True)), guess, flattened(total))

        for name, total in part.updates.items():
            yield view(name, math.nan, total, part.steps[name])
        of_run = self.training.privacy.update_noise_multiplier(self.training.algorithm.cohort)
        for multiplier in sorted({*self.hparams.noise, of_run} - {0.0}):
            noises, total = self._noise_of(group, multiplier), part.updates[CLIPPED]
            noised = {name: value + noises[name] for name, value in total.items()}
            yield view(NOISED, multiplier, noised, part.steps[CLIPPED])

    def _noise_of(self, group: Group, multiplier: float) -> Params:
        """Return noise: for all users of the round, the noise of the run; otherwise other draws of it."""
        training, state, seed = self.training, self.state, self.run.config.seed
        clip = state.clip or 0.0
        process = training.algorithm.process(training.privacy, len(self.users), self.run.rounds)
        if group[0] < len(self.requests):
            seed = int(stream(seed, "noise of a smaller sum", *group).integers(2**31))
        if skellam := noise.skellam_of(process, seed, state.params):
            noises, unit = skellam.integers(multiplier, state.round), clip / skellam.steps
        else:
            (noises, _), unit = noise.step(process, seed, state.params, state.moments, state.round), multiplier * clip
        return {name: unit * value for name, value in noises.items()}

    @cached_property
    def _predicted(self) -> Tensor:
        """Return the mean prediction of the model on records of test users, who are never trained on."""
        test = self.run.corpus.split("test")
        rng = stream(self.run.config.seed, "public records")
        chosen = rng.choice(test.records, min(PUBLIC, test.records), replace=False)
        return mean_prediction(self.model, test.records_at(chosen), test.layout)

    def _word_rows(self, views: Sequence[_View], data: Mapping[Group, CohortSum]) -> list[dict[str, Any]]:
        """Return a row per set of words, size and view, as means over groups."""
        if not any(view.guess for view in views):
            return []
        layout, others, holders = self.users.layout, self._counts_of_others(), self._holders()
        text = np.array(layout.text_ids)
        order = np.arange(layout.vocabulary_size)
        order[text] = stream(self.run.config.seed, "permuted words").permutation(text)
        is_text = np.isin(np.arange(layout.vocabulary_size), text)
        rows = []
        for subject, among in ((WORDS, is_text), (RARE_WORDS, is_text & (holders > 0) & (holders <= RARE))):
            for view in views:
                if (guess := view.guess) is None:
                    continue
                counts, nothing = data[view.group].counts, np.zeros(layout.vocabulary_size, np.int64)
                guesses = {
                    "": (guess, counts),
                    "blind_": (blind_guess(self.unigram, guess.chosen), counts),
                    "other_": (guess, others.get(view.group, nothing)),
                    "permuted_": (guess.permuted(order), counts),
                }
                measured = {
                    prefix + name: value
                    for prefix, pair in guesses.items()
                    for name, value in measures_of_words(*pair, among).items()
                }
                rows.append({"subject": subject} | view.key | measured)
        return [
            dict(zip(["subject", *KEY], key, strict=True)) | {"groups": len(group)} | _means(group[[*measured]])
            for key, group in pd.DataFrame(rows).groupby(["subject", *KEY], sort=False, dropna=False)
        ]

    def _counts_of_others(self) -> dict[Group, Ints]:
        """Return the counts of equally many users outside the cohort, by size and group."""
        outside = np.setdiff1d(np.arange(len(self.users)), self.cohort)
        rng = stream(self.run.config.seed, "users outside the cohort", self.state.round)
        chosen = rng.permutation(outside)[: len(self.requests)]
        parts = (data_of_user(self.training, self.state, user) for user in chosen.tolist())
        return {group: part.counts for group, part in sums_by_size(parts, self._sizes)}

    def _holders(self) -> Ints:
        """Return the number of training users whose text contains each token, int64 [V]."""
        holders = np.zeros(self.users.layout.vocabulary_size, np.int64)
        for user in tracked(f"{self.run.name}: counting words of users", range(len(self.users)), "users"):
            holders[np.unique(self.users[user].tokens)] += 1
        return holders

    def _targets(self, views: Sequence[_View], data: Mapping[Group, CohortSum]) -> pd.DataFrame:
        """Return a row for the test of each candidate against each sum."""
        seed, sums, hparams = self.run.config.seed, {group: part.records for group, part in data.items()}, self.hparams
        rng = stream(seed, "revealed records", self.state.round)
        kinds = [record_candidates(self.users, self.cohort, sums, hparams.records, hparams.references, rng)]
        if self.run.config.canaries.source == "words" and self.run.canaries:
            kinds.append(canary_candidates(self.users, self.run.canaries, sums, hparams.references, seed))
        vectors, tables = torch.stack([view.vector for view in views], dim=1), []
        for one in tracked(f"{self.run.name}: testing records", kinds):
            blind = np.array([self.unigram[text].mean() if len(text) else 0.0 for text in one.texts])
            for view, scores in zip(
                views, alignments(self.model, one.texts, self.users.layout, vectors).T, strict=True
            ):
                inside, references = one.inside[view.group], scores[len(one.names) :]
                rows = np.concatenate([inside, one.outside[view.group]])
                ranks = ranks_among(scores[rows], references)
                columns = {
                    "subject": one.kind,
                    "name": [one.names[row] for row in rows],
                    "group": view.group[1],
                    "is_inside": np.arange(len(rows)) < len(inside),
                    "score": scores[rows],
                    "blind_score": blind[rows],
                    "rank": ranks,
                    "references": len(references),
                    "p": p_values(ranks, len(references)),
                }
                tables.append(pd.DataFrame(view.key | columns))
        return pd.concat(tables, ignore_index=True)


def _record_rows(targets: pd.DataFrame, has_independent_noise: bool) -> list[dict[str, Any]]:
    """Return a row per kind, size and view: how many records inside and outside have a small p-value."""
    rows = []
    for key, tested in targets.groupby(["subject", *KEY], sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(["subject", *KEY], key, strict=True)) | {"groups": tested["group"].nunique()}
        areas = [
            {"auroc": _area(part, "score"), "blind_auroc": _area(part, "blind_score")}
            for _, part in tested.groupby("group")
        ]
        row |= _means(pd.DataFrame(areas))
        inside, references = tested["is_inside"], int(tested["references"].iloc[0])
        row |= {"n_in": int(inside.sum()), "n_out": int((~inside).sum()), "references": references}
        ranks = tested["rank"].to_numpy("float64")
        alarms = detections_by_level(ranks[~inside], references, LEVELS)
        for level, found in detections_by_level(ranks[inside], references, LEVELS).items():
            row |= {
                column("tpr", level): found["estimate"],
                column("tpr_low", level): found["low"],
                column("tpr_high", level): found["high"],
                column("fpr", level): alarms[level]["estimate"],
            }
            if row["view"] == NOISED and has_independent_noise:
                # one user replaced: two steps of mu = 1 / z
                row[column("allowed", level)] = 1 - gaussian(2 / row["noise_multiplier"])(1 - level)
        rows.append(row)
    return rows


def _area(tested: pd.DataFrame, score: str) -> float:
    scores, inside = tested[score].to_numpy("float64"), tested["is_inside"].to_numpy(bool)
    return auroc(scores[inside], scores[~inside]) if 0 < inside.sum() < len(inside) else np.nan


def _means(values: pd.DataFrame) -> dict[str, Any]:
    """Return the mean of each column over groups; from `FEWEST` groups on, also Student's t interval of the area."""
    areas = values["auroc"].dropna().to_numpy("float64")
    low, high = np.clip(t_interval(areas), 0, 1) if len(areas) >= FEWEST else (np.nan, np.nan)
    return {str(name): mean for name, mean in values.mean().items()} | {"auroc_low": low, "auroc_high": high}


def _checkpoint_before(run: Run, round_: int | None) -> Path | None:
    """Return the checkpoint before a round, by default the last one that has one; None for the first round."""
    saved = {checkpoint.round_of(path) + 1: path for path in checkpoint.all_in(run.path / "checkpoints")}
    rounds = [1, *(after for after in sorted(saved) if 1 < after <= run.rounds)]
    if round_ is None:
        round_ = rounds[-1]
    if round_ not in rounds:
        listed = ", ".join(f"{one:,}" for one in rounds[:LISTED]) + ", ..." * (len(rounds) > LISTED)
        raise InputError(
            f"{run.path}: round {round_:,} has no checkpoint before it, or is not part of the run; rounds that can be "
            f"attacked: {listed}"
        )
    return saved.get(round_)
