"""The one place that makes a model by its settings."""

from flsim.models.cifg import CIFGLanguageModel
from flsim.models.hparams import Architecture, ModelHParams
from flsim.models.language_model import NextWordModel, Params
from flsim.models.recurrent import RecurrentLanguageModel
from flsim.models.transformer import TransformerLanguageModel

KINDS: dict[Architecture, type[CIFGLanguageModel | RecurrentLanguageModel | TransformerLanguageModel]] = {
    "cifg": CIFGLanguageModel,
    "lstm": RecurrentLanguageModel,
    "gru": RecurrentLanguageModel,
    "transformer": TransformerLanguageModel,
}


def build(vocabulary_size: int, hparams: ModelHParams) -> NextWordModel:
    """A model of these settings, all zeros."""
    return KINDS[hparams.architecture](vocabulary_size, hparams)


def restore(params: Params, hparams: ModelHParams) -> NextWordModel:
    """A model of these settings with a copy of these parameters, of their dtype and where they are."""
    model = build(len(params["embedding"]), hparams).to(params["embedding"])
    model.load_state_dict(params)
    return model
