"""A next-word model whose training is mean estimation, to run formulas about means through the complete platform."""

import torch
from torch import Tensor, nn

from flsim.data.records import Layout
from flsim.models.language_model import ModelSettings, TrainableModel

NEVER = -1e9  # logit of the special tokens, which no record holds


def values_of(vocabulary_size: int) -> Tensor:
    """Return the number that each token id represents, float32 [V]: consecutive integers around 0, NaN for others."""
    layout = Layout(vocabulary_size)
    values = torch.full((vocabulary_size,), torch.nan)
    values[layout.first_word : layout.last_word + 1] = torch.arange(layout.words) - (layout.words - 1) / 2
    return values


class GaussianWords(TrainableModel):
    """A normal distribution over the numbers that words represent; only its mean at each position is learned.

    The logit of a word of value x at position t is -(x - theta_t)^2 / (2 tau^2). On a lattice of spacing 1 the
    normalizing sum depends on theta_t by less than exp(-2 pi^2 tau^2), as long as theta_t is several tau from either
    end. So the cross-entropy is (x - theta_t)^2 / (2 tau^2) and a constant, and a step of SGD is a step of mean
    estimation (`experiments.theory.mean_estimation`), for each position separately. `rate_for` has the learning rate.

    `options` are `positions`, the number of words of a record, and `tau`, at least 1.
    """

    def __init__(self, vocabulary_size: int, hparams: ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        self.theta = nn.Parameter(torch.zeros(int(hparams.options["positions"])))
        self.register_buffer("values", values_of(vocabulary_size), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of tokens int64 [B, T]; they depend only on the position."""
        time = tokens.shape[1]
        values: Tensor = self.values  # type: ignore[assignment]
        away = (values - self.theta[:time, None]) / float(self.hparams.options["tau"])
        logits = torch.where(values.isnan(), NEVER, -away.nan_to_num().square() / 2)
        return logits.expand(len(tokens), time, -1)


def rate_for(rate: float, options: dict[str, float]) -> float:
    """Return the learning rate of SGD that moves each theta_t by 2 rate (x - theta_t) in a step.

    The loss of a step is a mean over the positions of a record, hence the factor `positions`.
    """
    return 2 * rate * options["tau"] ** 2 * options["positions"]
