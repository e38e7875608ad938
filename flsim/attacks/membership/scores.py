"""Scores of records from the log-probabilities of their tokens, where larger means membership.

Shapes: N records, T the length of the longest record in tokens. Log-probabilities are natural, float64 [N, T]; values
after the end of a record are ignored. A record has n tokens: its words, and the end of the sequence if it is predicted.
"""

from collections.abc import Sequence
from zlib import compress

import numpy as np
import scipy

from flsim.base.arrays import Flags, Floats, Ints

SHARE = 0.2  # share of a record's tokens in Min-K% and Min-K%++
ERRORS = 2  # smallest number of errors of a record for the error zone
WINDOWS = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)  # tokens of a window
LARGEST = 0.01  # limit of a token's divergence


def mean_log_probability(log_probs: Floats, lengths: Ints) -> Floats:
    """Return (1/n) sum_i log p(t_i | t_<i), the negative loss of each record of n >= 1 tokens [N].

    See Yeom et al., "Privacy Risk in Machine Learning" (2018), section 3. A sum would rank short records above long
    ones.
    """
    return _sums(log_probs, lengths) / lengths


def against_reference(log_probs: Floats, of_reference: Floats, lengths: Ints) -> Floats:
    """Return sum_i [log p(t_i | t_<i) - log q(t_i | t_<i)] for a reference q that was not trained on the record [N].

    See Carlini et al., "Extracting Training Data from Large Language Models" (2021), section 5.1, and the calibration
    of Watson et al., "On the Importance of Difficulty Calibration in Membership Inference Attacks" (2022), equation 2.
    """
    return _sums(log_probs - of_reference, lengths)


def per_compressed_byte(log_probs: Floats, lengths: Ints, texts: Sequence[str]) -> Floats:
    """Return sum_i log p(t_i | t_<i) per byte of the text as zlib compresses it [N].

    See Carlini et al. (2021), section 5.1, "Comparing to zlib Compression". A header of 11 bytes outweighs short texts.
    """
    return np.asarray(_sums(log_probs, lengths) / compressed_bytes(texts))


def compressed_bytes(texts: Sequence[str]) -> Floats:
    """Return the number of bytes of each text as zlib compresses it, float64 [N]."""
    return np.array([len(compress(text.encode())) for text in texts], np.float64)


def lowest_share(values: Floats, lengths: Ints, share: float = SHARE) -> Floats:
    """Return the mean of the lowest max(1, floor(share n)) values of each record [N]: Min-K% of log-probabilities.

    See Shi et al., "Detecting Pretraining Data from Large Language Models" (2024), equation 2.

    >>> float(lowest_share(-np.arange(1.0, 11.0)[None], np.array([10]))[0])
    -9.5
    """
    ordered = np.sort(np.where(_is_token(values, lengths), values, np.inf), axis=1)
    counts = np.maximum(1, np.floor(share * lengths + 1e-9).astype(np.int64))  # 0.2 n can round below an integer
    return np.asarray(_sums(ordered, counts) / counts)


def standardized(log_probs: Floats, means: Floats, deviations: Floats) -> Floats:
    """Return z_i = (log p(t_i | t_<i) - mu_i) / sigma_i [N, T], from which Min-K%++ uses the `lowest_share`.

    mu = sum_v p_v log p_v over the vocabulary at each position, and sigma^2 = sum_v p_v (log p_v)^2 - mu^2; z is 0 if
    sigma is 0, because all tokens are then equally likely. See Zhang et al., "Min-K%++: Improved Baseline for Detecting
    Pre-Training Data from Large Language Models" (2025), equation 3.
    """
    is_spread = deviations > 0
    return np.asarray(np.where(is_spread, log_probs - means, 0.0) / np.where(is_spread, deviations, 1.0))


def against_neighbours(own: Floats, of_neighbours: Floats) -> Floats:
    """Return the mean loss of each record's neighbours [N, neighbours] minus the loss of the record [N].

    See Mattern et al., "Membership Inference Attacks against Language Models via Neighbourhood Comparison" (2023),
    equation 3. Both losses are negative: `mean_log_probability`.
    """
    return np.asarray(own - of_neighbours.mean(axis=1))


def error_zone(log_probs: Floats, of_reference: Floats, is_likeliest: Flags, lengths: Ints) -> Floats:
    """Return P / N of each record [N]: the sum of positive and of negative shifts in its error zone.

    The error zone has the tokens that are not the model's most likely ones, without the first token of the record. The
    shift of a token is log p(t_i | t_<i) - log q(t_i | t_<i), for a reference q, usually the model before training. The
    score is 0 with fewer than two errors, or without a negative shift. See Ilic et al., "Powerful Training-Free
    Membership Inference Against Autoregressive Language Models" (2026), and github.com/JetBrains-Research/ez-mia at
    aa0b6b7.
    """
    is_error = ~is_likeliest & (np.arange(log_probs.shape[1]) > 0) & _is_token(log_probs, lengths)
    shifts = np.where(is_error, log_probs - of_reference, 0.0)
    positive, negative = shifts.clip(min=0).sum(axis=1), -shifts.clip(max=0).sum(axis=1)
    is_known = (is_error.sum(axis=1) >= ERRORS) & (negative > 0)
    return np.asarray(np.where(is_known, positive, 0.0) / np.where(is_known, negative, 1.0))


def windows_above(log_probs: Floats, of_reference: Floats, lengths: Ints) -> Floats:
    """Return the share of windows of a record that p finds more likely than q, averaged over `WINDOWS` [N].

    A window is a number of consecutive tokens, at most all n >= 1 of the record; q is usually the model before
    training. See Chen et al., "Window-based Membership Inference Attacks Against Fine-tuned Large Language Models"
    (2026); sizes are those of its code, github.com/Stry233/WBC at 8112878.
    """
    until = np.pad((log_probs - of_reference).cumsum(axis=1), ((0, 0), (1, 0)))
    start, shares = np.arange(log_probs.shape[1]), np.zeros(len(lengths))
    for size in WINDOWS:
        width = np.minimum(size, lengths)[:, None]
        is_inside = start + width <= lengths[:, None]
        end = np.minimum(start + width, log_probs.shape[1])
        is_above = np.take_along_axis(until, end, axis=1) > until[:, :-1]
        shares += (is_above & is_inside).sum(axis=1) / is_inside.sum(axis=1)
    return shares / len(WINDOWS)


def divergence(log_probs: Floats, of_unigram: Floats, tokens: Ints, lengths: Ints) -> Floats:
    """Return the mean of min(-p(t_i | t_<i) log f(t_i), `LARGEST`) over the distinct tokens of each record [N].

    f is the frequency of single tokens. Of equal tokens, the first one counts. See Zhang et al., "Pretraining Data
    Detection for Large Language Models: A Divergence-based Calibration Method" (2024), and its code,
    github.com/zhang-wei-chao/DC-PDD at 8461d44, which has this limit.
    """
    order = np.argsort(tokens, axis=1, kind="stable")
    ordered = np.take_along_axis(tokens, order, axis=1)
    is_first = np.empty(tokens.shape, bool)
    np.put_along_axis(is_first, order, np.diff(ordered, axis=1, prepend=ordered[:, :1] - 1) != 0, axis=1)
    is_first &= _is_token(log_probs, lengths)
    divergences = np.minimum(-np.exp(log_probs) * of_unigram, LARGEST)
    return np.asarray(np.where(is_first, divergences, 0.0).sum(axis=1) / is_first.sum(axis=1))


def quantile_fit(features: Floats, values: Floats, level: float) -> Floats:
    """Return the coefficients [F + 1], constant first, of the linear quantile regression of values [n] on features.

    They minimize the mean pinball loss max(level r, (level - 1) r) of the residuals r (Koenker and Bassett, "Regression
    Quantiles", 1978), exactly, as a linear program: Bertran et al., "Scalable Membership Inference Attacks via Quantile
    Regression" (2023). Features are [n, F].
    """
    design = np.column_stack([np.ones(len(values)), features])
    count, width = design.shape
    cost = np.concatenate([np.zeros(width), np.full(count, level), np.full(count, 1 - level)])
    identity = scipy.sparse.identity(count, format="csr")
    equations = scipy.sparse.hstack([scipy.sparse.csr_matrix(design), identity, -identity])  # value = fit + up - down
    bounds = [(None, None)] * width + [(0, None)] * (2 * count)
    solved = scipy.optimize.linprog(cost, A_eq=equations, b_eq=values, bounds=bounds, method="highs")
    return np.asarray(solved.x[:width])


def logistic_fit(features: Floats, is_member: Flags, penalty: float = 1e-3) -> Floats:
    """Return the coefficients [F] of a penalized logistic regression on standardized features [n, F]."""
    signs = np.where(is_member, 1.0, -1.0)

    def loss(weights: Floats) -> tuple[float, Floats]:
        margins = signs * (features @ weights[1:] + weights[0])
        slopes = -signs * scipy.special.expit(-margins) / len(signs)
        gradient = np.concatenate([[slopes.sum()], features.T @ slopes + penalty * weights[1:]])
        return float(-scipy.special.log_expit(margins).mean() + penalty / 2 * weights[1:] @ weights[1:]), gradient

    solved = scipy.optimize.minimize(loss, np.zeros(features.shape[1] + 1), jac=True, method="BFGS")
    return np.asarray(solved.x[1:])


def _is_token(values: Floats, lengths: Ints) -> Flags:
    return np.asarray(np.arange(values.shape[1]) < lengths[:, None])


def _sums(values: Floats, lengths: Ints) -> Floats:
    return np.asarray(np.where(_is_token(values, lengths), values, 0.0).sum(axis=1))
