"""The settings of the network: architecture and sizes."""

from typing import Annotated

from flsim.base.errors import InputError
from flsim.base.extensions import CustomName, declared_label, is_custom, refuse_options
from flsim.base.settings import settings
from flsim.models.architectures import BUILT_IN
from flsim.models.hf import OF_BASE, RECORDED
from flsim.models.language_model import ModelSettings


@settings
class ModelHParams(ModelSettings):
    """Architecture and sizes of the network; see `flsim.models.architectures`.

    Attributes:
        embedding: Size D of the word embeddings, which the output layer shares. Unit: values.
        units: Number H of cells in each layer; of a transformer, of hidden units in each feed-forward part; of a
            convolutional network, of filters. Unit: cells.
        architecture: Network: the paper's "cifg", another built-in one, or your own subclass of
            `flsim.models.language_model.TrainableModel`.
        layers: Number of layers; "cifg" has 1. Unit: layers.
        heads: Number of attention heads of a transformer, which divides `embedding`. Unit: heads.
        filter_width: Number of tokens that a filter of a convolutional network reads, e.g. 5. Unit: tokens.
        options: Numbers or text for a custom architecture, e.g. { scale = 2.5 }. Unit: none.
        path: Of architecture "hf": folder of the base model, with config.json and .safetensors files, relative to the
            configuration file.
        digest: Of architecture "hf": sha256 of the files in `path`, which the run folder records; changed files are
            refused.
        tokens: Of architecture "hf": file of the base's token id for each token id of the corpus, which the run folder
            records.
        config: Of architecture "hf", in place of `path`: settings of a base with random weights, by transformers'
            names, e.g. { model_type = "gpt2", n_layer = 2 }. Unit: none.
        dtype: Of architecture "hf" with `lora`: type of the base's values.
        lora: Of architecture "hf": train low-rank adapters on the frozen base. When not set: all weights are trained.

    Examples:
        >>> flsim.Model(embedding=32, units=64)                                # doctest: +SKIP
    """

    architecture: Annotated[str, CustomName("architecture", BUILT_IN)] = "cifg"

    def __post_init__(self) -> None:
        if not is_custom(self.architecture):
            BUILT_IN[self.architecture].refuse_settings(self)
        refuse_options(self.architecture, self.options, "options")
        for name in () if self.architecture == "hf" else (*OF_BASE, *RECORDED):
            if getattr(self, name) != getattr(ModelSettings(), name):
                raise InputError(f'{name} is for architecture "hf", found "{self.architecture}"; remove it')

    @property
    def label(self) -> str:
        """Return the architecture's name in a table's row; empty for the paper's."""
        if is_custom(self.architecture):  # no code is executed to name a row
            return declared_label(self.architecture)
        return BUILT_IN[self.architecture].label_of(self)
