"""The built-in attacks by name, and the control that reads no model."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.attacks.membership import scores
from flsim.attacks.membership.candidates import (
    Attack,
    Candidates,
    Learned,
    gradient_norms,
    likeliest,
    log_probabilities,
    moments,
)
from flsim.base.arrays import Floats
from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import custom_call_errors, is_custom, resolve, short_name
from flsim.data.records import Records
from flsim.models.language_model import refusing_changes


def own_attack(name: str, attack: object) -> Attack:
    """Return a custom `Attack` or function of `Candidates` as an attack whose failures are RunFailed with its file."""
    if not isinstance(attack, Attack):
        if isinstance(attack, type) or not callable(attack):
            kind = "class" if isinstance(attack, type) else type(attack).__name__
            raise InputError(
                f"{name}: found a {kind}; use a flsim.attacks.membership.Attack or a function of candidates"
            )
        attack = Attack(short_name(name), attack)
    score, fit = attack.score, attack.fit
    parts = [("score", score, "it a function")] + [("fit", fit, "it a function, or remove it")] * (fit is not None)
    for part, function, remedy in parts:
        if isinstance(function, type) or not callable(function):
            raise InputError(f"{name}: its `{part}` is {function!r:.60}; make {remedy}")

    def guarded(candidates: "Candidates") -> Any:
        models, count = [candidates.model, candidates.reference], len(candidates)
        with refusing_changes(name, models), custom_call_errors(name, "score(candidates)"):
            values = score(candidates)
        if fit is None:
            return values
        with suppress(TypeError, ValueError):
            statistics = np.asarray(values, np.float64)
            if statistics.ndim == 2 and len(statistics) == count:
                return statistics
        raise RunFailed(
            f"{name}: score returned no row of numbers for each of {count} records; fit needs float64 [N, F]"
        )

    return replace(attack, score=guarded, fit=None if fit is None else _guarded_fit(name, fit))


def _guarded_fit(name: str, fit: Callable[..., Learned]) -> Callable[..., Learned]:
    def guarded(statistics: Floats, is_member: Any) -> Learned:
        with custom_call_errors(name, "fit(statistics, is_member), which returns a function of statistics"):
            learned = fit(statistics, is_member)
            if not callable(learned):
                raise TypeError(f"fit returned a {type(learned).__name__}")

        def scores(values: Floats) -> Floats:
            with custom_call_errors(name, "a function of statistics [n, F] as what fit returns"):
                return learned(values)

        return scores

    return guarded


NEIGHBOURS = 25  # number of neighbours of each record
LEVEL = 0.9  # of the quantile regression: 1 minus a false-positive rate of 10%, fixed before scores are known


def loss(candidates: Candidates) -> Floats:
    return scores.mean_log_probability(candidates.log_probs, candidates.lengths)


def reference(candidates: Candidates) -> Floats:
    return scores.against_reference(candidates.log_probs, candidates.reference_log_probs, candidates.lengths)


def zlib(candidates: Candidates) -> Floats:
    return scores.per_compressed_byte(candidates.log_probs, candidates.lengths, candidates.texts)


def min_k(candidates: Candidates) -> Floats:
    return scores.lowest_share(candidates.log_probs, candidates.lengths)


def min_k_plus_plus(candidates: Candidates) -> Floats:
    means, deviations = moments(candidates.model, candidates.records, candidates.layout)
    return scores.lowest_share(scores.standardized(candidates.log_probs, means, deviations), candidates.lengths)


def neighbourhood(candidates: Candidates) -> Floats:
    texts = candidates.neighbours(NEIGHBOURS)
    log_probs = log_probabilities(candidates.model, texts, candidates.layout)
    of_neighbours = scores.mean_log_probability(log_probs, np.repeat(candidates.lengths, NEIGHBOURS))
    return scores.against_neighbours(loss(candidates), of_neighbours.reshape(-1, NEIGHBOURS))


def gradient(candidates: Candidates) -> Floats:
    """Return the negative norm of the gradient of each record, as Nasr et al. (2019)."""
    return -gradient_norms(candidates.model, candidates.records, candidates.layout)


def error_zone(candidates: Candidates) -> Floats:
    is_likeliest = likeliest(candidates.model, candidates.records, candidates.layout)
    return scores.error_zone(candidates.log_probs, _of_model("ez", candidates), is_likeliest, candidates.lengths)


def window_based(candidates: Candidates) -> Floats:
    return scores.windows_above(candidates.log_probs, _of_model("wbc", candidates), candidates.lengths)


def _of_model(name: str, candidates: Candidates) -> Floats:
    if candidates.reference is None:
        raise InputError(
            f"attack {name}: needs a reference; name one with --reference: the checkpoint of another "
            'run, or base for architecture "hf"'
        )
    return candidates.reference_log_probs


def conditional(candidates: Candidates) -> Floats:
    """Return the mean log-probability of each record after the context, cut to fit, divided by that without context.

    See Xie et al., "ReCaLL: Membership Inference via Relative Conditional Log-Likelihoods" (2024).
    """
    layout, context = candidates.layout, candidates.context or Records.from_lists([])
    room = getattr(getattr(candidates.model, "config", None), "max_position_embeddings", None) or np.inf
    longest = max(layout.record_words, int(candidates.lengths.max(initial=0)))
    prefix = context.tokens[: context.offsets[context.offsets + longest <= room].max(initial=0)].tolist()
    if not prefix:
        raise InputError(
            "attack recall: found no held-out record that is not attacked and fits into the model before other "
            "records; lower --records, or choose another attack"
        )
    texts = Records.from_lists([[*prefix, *record.tolist()] for record in candidates.records])
    texts = replace(texts, prompts=np.full(len(texts), len(prefix)))
    longer = replace(layout, record_words=layout.record_words + len(prefix))
    log_probs = log_probabilities(candidates.model, texts, longer)[:, len(prefix) :]
    return scores.mean_log_probability(log_probs, candidates.lengths) / loss(candidates)


def divergence(candidates: Candidates) -> Floats:
    return scores.divergence(candidates.log_probs, candidates.unigram_log_probs, candidates.tokens, candidates.lengths)


def quantile_statistics(candidates: Candidates) -> Floats:
    """Return each record's mean log-probability, then statistics without the model [N, 4]."""
    compressed = scores.compressed_bytes(candidates.texts)
    return np.column_stack([loss(candidates), blind_statistics(candidates), compressed])


def quantile_of_others(statistics: Floats, is_member: NDArray[np.bool_]) -> Learned:
    """Return the first statistic minus its quantile among non-members, which is linear in the other statistics."""
    place, scale = _standard(statistics[:, 1:])

    def features(values: Floats) -> Floats:
        return (values[:, 1:] - place) / scale

    others = statistics[~is_member]
    weights = scores.quantile_fit(features(others), others[:, 0], LEVEL)
    return lambda values: values[:, 0] - weights[0] - features(values) @ weights[1:]


def blind_statistics(candidates: Candidates) -> Floats:
    """Return the number of words of each record, and its mean log-probability by the unigram [N, 2]."""
    unigram = scores.mean_log_probability(candidates.unigram_log_probs, candidates.lengths)
    return np.column_stack([candidates.words.astype(np.float64), unigram])


def logistic(statistics: Floats, is_member: NDArray[np.bool_]) -> Learned:
    """Return the log-odds of membership that are linear in the statistics."""
    place, scale = _standard(statistics)
    weights = scores.logistic_fit((statistics - place) / scale, is_member)
    return lambda values: (values - place) / scale @ weights


def _standard(values: Floats) -> tuple[Floats, Floats]:
    """Return means and standard deviations [F]; 1 for a statistic that does not vary."""
    deviations = values.std(axis=0)
    return values.mean(axis=0), np.where(deviations > 0, deviations, 1.0)


BLIND = Attack("blind", blind_statistics, logistic)
BY_DEFAULT: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        Attack("loss", loss),
        Attack("reference", reference),
        Attack("zlib", zlib),
        Attack("min-k", min_k),
        Attack("min-k++", min_k_plus_plus),
        Attack("neighbourhood", neighbourhood),
        Attack("gradient", gradient),
        Attack("quantile", quantile_statistics, quantile_of_others),
        BLIND,
    )
}
ON_REQUEST = (
    Attack("ez", error_zone),
    Attack("wbc", window_based),
    Attack("recall", conditional),
    Attack("dc-pdd", divergence),
)
BUILT_IN: dict[str, Attack] = BY_DEFAULT | {attack.name: attack for attack in ON_REQUEST}


def attack_named(name: str) -> Attack:
    """Return a built-in attack, or that at ``path/to/file.py:NAME``, which must not have the name of a built-in one."""
    attack = resolve(name, BUILT_IN, "attack")
    if not is_custom(name):
        return attack
    custom = own_attack(name, attack)
    if custom.name in BUILT_IN:
        raise InputError(f"{name}: flsim has an attack {custom.name}, whose rows this attack would replace; rename it")
    return custom
