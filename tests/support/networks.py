"""A small network of each architecture, and an independent computation of it in plain NumPy."""

import numpy as np
import torch
from memorization.oracle import LAYOUT, Oracle, Phrase
from numpy.typing import NDArray
from scipy.special import erf, expit, log_softmax, softmax

from flsim.base.rng import stream
from flsim.data.records import Layout
from flsim.models.architectures import CIFGLanguageModel, ModelHParams, build
from flsim.models.language_model import NextWordModel

Array = NDArray[np.float64]
CIFG = ModelHParams(3, 5)
OTHERS = (
    ModelHParams(3, 5, "lstm"),
    ModelHParams(4, 4, "lstm", layers=2),  # without a projection
    ModelHParams(3, 5, "gru", layers=2),
    ModelHParams(4, 6, "transformer", layers=2, heads=2),
    ModelHParams(3, 5, "convolutional", layers=3, filter_width=2),  # outputs depend on 8 tokens
    ModelHParams(4, 4, "convolutional"),  # without a projection
)
RECURRENT = (ModelHParams(3, 3, "lstm", layers=3), *OTHERS[:3])
ALL = (CIFG, *OTHERS)


def name_of(hparams: object) -> str:
    """Return the name of a test's parameter."""
    return hparams.label or "CIFG" if isinstance(hparams, ModelHParams) else str(hparams)


def random_network(hparams: ModelHParams, seed: int, scale: float = 1.0, layout: Layout = LAYOUT) -> NextWordModel:
    """Return a float64 network; its weights and biases are normal, with deviation `scale`. `LAYOUT` has four words."""
    model, rng = build(layout.vocabulary_size, hparams).double(), stream(seed, "test", "network")
    assert isinstance(model, NextWordModel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(scale * rng.normal(size=tuple(parameter.shape))))
    return model


def loud_network(vocabulary_size: int, factor: float) -> CIFGLanguageModel:
    """Return a float64 network with its initial weights times a factor, so that scores are far apart."""
    model = CIFGLanguageModel(vocabulary_size, ModelHParams(4, 6)).initialize(1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


class Equations(Oracle):
    """Scores of an LSTM, a GRU, a transformer or a convolutional network, only from the equations of the papers."""

    def __init__(self, model: NextWordModel) -> None:
        super().__init__(model)
        self.hparams = model.hparams

    def _costs(self, tokens: Phrase) -> Array:
        readers = {"transformer": self._attend, "convolutional": self._convolve}
        output = readers.get(self.hparams.architecture, self._recur)(self.p["embedding"][list(tokens)])
        return np.asarray(-log_softmax(self.p["embedding"] @ output + self.p["output_bias"]))

    def _recur(self, x: Array) -> Array:
        for layer in range(self.hparams.layers):
            w, u, b, d = (self.p[f"cells.{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            h, c, reached = np.zeros(self.hparams.units), np.zeros(self.hparams.units), []
            for value in x:
                if self.hparams.architecture == "lstm":
                    i, f, g, o = np.split(w @ value + b + u @ h + d, 4)
                    c = expit(f) * c + expit(i) * np.tanh(g)
                    h = expit(o) * np.tanh(c)
                else:
                    (r, z, n), (hr, hz, hn) = np.split(w @ value + b, 3), np.split(u @ h + d, 3)
                    keep = expit(z + hz)
                    h = (1 - keep) * np.tanh(n + expit(r + hr) * hn) + keep * h
                reached.append(h)
            x = np.array(reached)
        return np.asarray(x[-1] @ self.p["projection"] if "projection" in self.p else x[-1])

    def _attend(self, x: Array) -> Array:
        size, heads = self.hparams.embedding, self.hparams.heads
        places = [
            [(np.cos if i % 2 else np.sin)(time / 10_000 ** ((i - i % 2) / size)) for i in range(size)]
            for time in range(len(x))
        ]
        x = np.sqrt(size) * x + np.array(places)
        for layer in range(self.hparams.layers):
            p = {name.removeprefix(f"layers.{layer}."): value for name, value in self.p.items()}
            normed = self._norm(x, p["norm1.weight"], p["norm1.bias"])
            q, k, v = np.split(normed @ p["self_attn.in_proj_weight"].T + p["self_attn.in_proj_bias"], 3, axis=1)
            mixed = np.zeros_like(x)
            for head in np.split(np.arange(size), heads):
                for time in range(len(x)):
                    scores = k[: time + 1, head] @ q[time, head] / np.sqrt(size / heads)
                    mixed[time, head] = softmax(scores) @ v[: time + 1, head]
            x = x + mixed @ p["self_attn.out_proj.weight"].T + p["self_attn.out_proj.bias"]
            normed = self._norm(x, p["norm2.weight"], p["norm2.bias"])
            hidden = normed @ p["linear1.weight"].T + p["linear1.bias"]
            hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
            x = x + hidden @ p["linear2.weight"].T + p["linear2.bias"]
        return np.asarray(self._norm(x, self.p["norm.weight"], self.p["norm.bias"])[-1])

    def _convolve(self, x: Array) -> Array:
        """Compute the convolutional layers, one filter, position and tap at a time."""
        for layer in range(self.hparams.layers):
            w, b = self.p[f"filters.{layer}.weight"], self.p[f"filters.{layer}.bias"]
            taps = w.shape[2]
            hidden = np.zeros((len(x), len(b)))
            for time in range(len(x)):
                for unit in range(len(b)):
                    value = b[unit]
                    for tap in range(taps):
                        place = time - (taps - 1 - tap) * 2**layer
                        value += w[unit, :, tap] @ x[place] if place >= 0 else 0
                    hidden[time, unit] = max(value, 0) + (x[time, unit] if layer else 0)
            x = hidden
        return np.asarray(x[-1] @ self.p["projection"] if "projection" in self.p else x[-1])

    @staticmethod
    def _norm(x: Array, gain: Array, bias: Array) -> Array:
        away = x - x.mean(1, keepdims=True)
        return np.asarray(gain * away / np.sqrt((away**2).mean(1, keepdims=True) + 1e-5) + bias)
