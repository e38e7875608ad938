"""The token ids that Beam Search writes after the known words of canaries."""

from collections.abc import Sequence

import torch

from flsim.canaries.spec import Canary
from flsim.data.vocabulary import Layout
from flsim.evaluation.evaluate import EvaluationHParams, known_words, refuse_short
from flsim.measures.measure import continuations
from flsim.memorization.beam_search import beam_search
from flsim.models.language_model import TrainableModel
from flsim.models.quantization import quantized


def write_on(
    model: TrainableModel, canaries: Sequence[Canary], layout: Layout, hparams: EvaluationHParams
) -> dict[str, tuple[int, ...]]:
    """Return, by the id of each canary, its known words and the likeliest continuation that a beam search finds.

    A canary is extracted where these are its own tokens.

    Args:
        model: the model, on its device.
        canaries: the canaries.
        layout: of token ids.
        hparams: prefix, beam width and bits of weights, as in an evaluation.

    Raises:
        InputError: the prefix leaves nothing of a canary.
        Diverged: a log-probability is not finite.
    """
    refuse_short(canaries, hparams)
    if hparams.weight_bits is not None:
        model = quantized(model, hparams.weight_bits)
    written = {}
    for canary in canaries:
        known = canary.tokens[: known_words(canary, hparams)]
        prefix = torch.tensor((layout.bos, *known), device=model.device)
        tokens, _ = beam_search(model, prefix, continuations(canary, len(known), layout), hparams.beam_width)
        written[canary.id] = (*known, *tokens[0].tolist())
    return written
