"""Causal language models of Hugging Face, fine-tuned with all weights or with LoRA adapters on a frozen base.

The base is a folder on this machine, or random weights of a configuration. Nothing is downloaded, and no code or pickle
of a folder is executed. transformers and peft are imported only when such a model is made.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flsim.base.errors import InputError, first_line
from flsim.base.files import digest, file_digest
from flsim.base.rng import shared_generators, stream
from flsim.models import language_model

CLOSED = -1e4  # logit of a token id without a token; -inf would give scores that are not finite
OF_BASE = ("path", "config", "dtype", "lora")  # settings that only this architecture has
RECORDED = ("digest", "tokens")  # settings that a run records: contents of files, and the corpus' ids
FILES = ("path", "tokens")  # settings that name files
BASE_SEED = 0  # of random weights that are not trained: one base for the runs of all seeds, as a pretrained one is
EXTRA = "pip install 'flsim-memorization[hf]'"


class HuggingFaceModel(language_model.TrainableModel):
    """A causal language model of transformers; with `lora`, adapters of peft are trained on a frozen base.

    A state holds each layer's keys and values so far, [B, heads, T, size] each. Dropout within the base is off.
    InputError if a package, a file or a name is missing, or the vocabulary does not fit.
    """

    label = "HF"
    capabilities = language_model.Capabilities(blocks=True)

    def __init__(self, vocabulary_size: int, hparams: language_model.ModelSettings) -> None:
        super().__init__(vocabulary_size, hparams)
        self.config = config_of(hparams, vocabulary_size)
        lora = hparams.lora
        with _quiet():
            self.network = _skeleton(self.config)
            if _is_shapes_only():
                values = None
            elif lora is None:
                values = {name: torch.zeros(value.shape) for name, value in self.network.state_dict().items()}
            else:
                values = base_of(hparams, vocabulary_size)
            if values is not None:
                self.network.load_state_dict(values, assign=True)
            self.network.tie_weights()
            self.network.requires_grad_(lora is None)
            if lora is not None:
                _inject(self.network, lora)
        self._inputs: Tensor | None  # int64 [V], the model's id of each id of the corpus; None if they are the same
        self._closed: Tensor | None  # bool [V], ids of the corpus without a logit
        inputs, closed = _token_map(hparams.tokens, vocabulary_size, self.config.vocab_size)
        self.register_buffer("_inputs", inputs, persistent=False)
        self.register_buffer("_closed", closed, persistent=False)

    @classmethod
    def refuse_settings(cls, hparams: language_model.ModelSettings) -> None:
        for name in language_model.SIZES:
            if getattr(hparams, name) != getattr(language_model.ModelSettings, name):
                raise InputError(f'{name} is not of architecture "hf"; name its sizes in model.config, or a model.path')
        if (hparams.path is None) == (not hparams.config):
            raise InputError('architecture "hf" needs either path, a folder, or config, a table with a model_type')
        if hparams.config and not isinstance(hparams.config.get("model_type"), str):
            raise InputError('config needs a model_type, such as "gpt2"')
        for name, value in hparams.config.items():
            if _is_dropout(name) and value:
                raise InputError(f"config.{name}: the base has no dropout here; remove it, or set model.lora.dropout")
        if hparams.lora is None and hparams.dtype != "float32":
            raise InputError(f'dtype "{hparams.dtype}" is for a frozen base; set model.lora, or "float32"')

    @classmethod
    def label_of(cls, hparams: language_model.ModelSettings) -> str:
        name = Path(hparams.path).name or "base" if hparams.path is not None else str(hparams.config["model_type"])
        lora = hparams.lora
        return name if lora is None else f"{name} {'FFA-' * lora.freeze_a}LoRA r={lora.rank}"

    @property
    def frozen_digest(self) -> str:
        """Return the digest of the base: of its files, or of its frozen weights if they are random."""
        if self.hparams.path is not None:
            return files_digest(self.hparams.path)
        frozen = {name: value for name, value in self.named_parameters() if not value.requires_grad}
        return language_model.digest_of(frozen) if frozen else ""

    def initialize(self, seed: int) -> "HuggingFaceModel":
        """Set the trained weights: those of the base; of adapters A as peft draws it, from the seed, and B zeros.

        Random weights of a configuration are drawn as transformers draws them.
        """
        lora, trained = self.hparams.lora, self.trainable
        with torch.no_grad():
            if lora is None:
                base = base_of(self.hparams, self.vocabulary_size, seed)
                for name, value in trained.items():
                    value.copy_(base[name.removeprefix("network.")])
                return self
            for name, value in trained.items():
                value.copy_(_first_a(seed, name, value) if ".lora_A." in name else torch.zeros_like(value))
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens)[0])

    def hidden(
        self, tokens: Tensor, state: language_model.State | None = None, keeps_state: bool = False
    ) -> tuple[Tensor, language_model.State]:
        """Return what the output layer reads, [B, T, D], after tokens int64 [B, T] and a state, and the new state."""
        ids = tokens if self._inputs is None else self._inputs[tokens]
        cache = _cache_of(self.config, state) if keeps_state else None
        result = self.network.base_model(input_ids=ids, past_key_values=cache, use_cache=keeps_state)
        layers = cache.layers if cache is not None else ()
        return result.last_hidden_state, tuple(part for layer in layers for part in (layer.keys, layer.values))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of the corpus' token ids, in float32 if the base is in bfloat16."""
        of_model: Tensor = self.network.get_output_embeddings()(hidden)
        if of_model.dtype == torch.bfloat16:
            of_model = of_model.float()
        if self._inputs is None or self._closed is None:
            return of_model
        return of_model[..., self._inputs].masked_fill(self._closed, CLOSED)

    def rows_of_tokens(self, tensors: language_model.Params) -> tuple[Tensor | None, Tensor | None]:
        names = {id(value): name for name, value in self.trainable.items()}

        def rows(parameter: Tensor | None) -> Tensor | None:
            if (name := names.get(id(parameter))) is None:
                return None
            of_model = tensors[name]
            return of_model if self._inputs is None else of_model[self._inputs.to(of_model.device)]

        bias = getattr(self.network.get_output_embeddings(), "bias", None)
        return rows(bias), rows(self.network.get_input_embeddings().weight)

    def logits_at(self, inputs: Tensor, real: Tensor, dropout_mask: Tensor | None = None) -> Tensor:
        if dropout_mask is not None:
            return super().logits_at(inputs, real, dropout_mask)  # which refuses it
        return self.logits(self.hidden(inputs)[0][real])

    @torch.no_grad()
    def start(self, tokens: Tensor) -> tuple[language_model.State, Tensor]:
        text = self.config.get_text_config(decoder=True)
        widest = max(4 * text.hidden_size, self.vocabulary_size // tokens.shape[1])
        rows = max(1, language_model.FLOATS // (tokens.shape[1] * widest))
        pieces = [self.hidden(piece, keeps_state=True) for piece in torch.split(tokens, rows)]
        last = torch.cat([hidden[:, -1] for hidden, _ in pieces])
        state = tuple(torch.cat(parts) for parts in zip(*(state for _, state in pieces), strict=True))
        return state, self.logits(last).log_softmax(-1)

    @torch.no_grad()
    def step(self, state: language_model.State, tokens: Tensor) -> tuple[language_model.State, Tensor]:
        hidden, state = self.hidden(tokens[:, None], state, keeps_state=True)
        return state, self.logits(hidden[:, -1]).log_softmax(-1)

    def with_blocks(self) -> list[language_model.LoraBlocks]:
        """Replace all layers that have adapters by blocks of users, in place, and return the blocks."""
        blocks = [layer for layer in self.modules() if isinstance(layer, language_model.LoraBlocks)]
        for path, layer in [(path, layer) for path, layer in self.named_modules() if hasattr(layer, "lora_A")]:
            of_a, of_b = (f"{path}.lora_{which}.default.weight" for which in "AB")
            a = layer.lora_A["default"].weight.detach()[None]
            blocks.append(language_model.LoraBlocks(layer.get_base_layer(), layer.scaling["default"], of_a, of_b, a))
            parent, _, name = path.rpartition(".")
            setattr(self.get_submodule(parent), name, blocks[-1])
        return blocks

    def export(self, folder: Path, merge: bool = False) -> None:
        """Write the model into an empty folder, in the form of peft or transformers.

        Adapters are for `peft.PeftModel.from_pretrained`, with a base of random weights in the subfolder "base".
        Without adapters, and with `merge`, which adds them to the base,
        `transformers.AutoModelForCausalLM.from_pretrained` reads the folder.
        """
        peft, lora = _imported("peft"), self.hparams.lora
        with _quiet():
            network = _skeleton(self.config)
            values = self.network.state_dict() if lora is None else base_of(self.hparams, self.vocabulary_size)
            network.load_state_dict({name: value.cpu().clone() for name, value in values.items()}, assign=True)
            network.tie_weights()
            if lora is None:
                network.save_pretrained(folder)
                return
            where = self.hparams.path
            if where is None and not merge:
                network.save_pretrained(folder / "base")
                where = "base"
            network.name_or_path = where or ""
            adapted = peft.get_peft_model(network, _lora_config(lora), autocast_adapter_dtype=False)
            state = self.network.state_dict().items()
            adapters = {f"base_model.model.{name}": value.cpu() for name, value in state if is_adapter(name)}
            adapted.load_state_dict(adapters, strict=False)
            (adapted.merge_and_unload() if merge else adapted).save_pretrained(folder)


def config_of(hparams: language_model.ModelSettings, vocabulary_size: int) -> Any:
    """Return the base's transformers.PreTrainedConfig, without dropout; InputError if transformers refuses it."""
    auto = _transformers().AutoConfig
    try:
        if hparams.path is not None:
            refuse_unsafe(Path(hparams.path))
            config = auto.from_pretrained(hparams.path, local_files_only=True, trust_remote_code=False)
        else:
            named = dict(hparams.config)
            kind = named.pop("model_type")
            known = auto.for_model(kind)
            unknown = [name for name in named if name not in known.to_dict() and name not in known.attribute_map]
            if unknown:
                raise InputError(f"model.config: {kind} has no setting {unknown[0]}; correct its name")
            # ids of the default vocabulary can be outside another one
            special = [name for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(known, name)]
            config = auto.for_model(kind, **{"vocab_size": vocabulary_size, **named, **dict.fromkeys(special)})
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"model: transformers refuses the configuration ({first_line(error)})") from error
    for name, value in config.to_dict().items():
        if _is_dropout(name) and isinstance(value, float):
            setattr(config, name, 0.0)
    if hparams.tokens is None and config.vocab_size != vocabulary_size and not _is_shapes_only():
        raise InputError(
            f"model: the base has {config.vocab_size:,} token ids, and the corpus has {vocabulary_size:,}; import the "
            f"corpus with the tokenizer of the base"
        )
    return config


def _is_dropout(name: str) -> bool:
    return name.endswith("pdrop") or "dropout" in name


def refuse_unsafe(folder: Path) -> None:
    """Raise InputError if a folder has no config.json, or no weights as safetensors; pickles are not read."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no folder of a model (it has no config.json); name one on this machine")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        content = f"only {pickles[0]}, a pickle, which could execute code" if pickles else "no weights"
        raise InputError(f"{folder}: holds {content}; save the model as .safetensors, as save_pretrained does")


def files_digest(folder: str) -> str:
    """Return the sha256, in hexadecimal, of the names and contents of a folder's configuration and weights."""
    refuse_unsafe(Path(folder))
    files = [Path(folder) / "config.json", *sorted(Path(folder).glob("*.safetensors"))]
    return digest(*(part for file in files for part in (file.name, file_digest(file))))


_bases: dict[str, language_model.Params] = {}  # the last two of this process, by content


def base_of(
    hparams: language_model.ModelSettings, vocabulary_size: int, seed: int = BASE_SEED
) -> language_model.Params:
    """Return the weights of the base by name, which a process's models share; tied ones have all of their names.

    Weights are drawn from `seed` if the settings name no folder. InputError if the folder's weights changed since their
    digest was recorded, or are not those of its configuration.
    """
    if hparams.path is None:
        content = json.dumps([dict(hparams.config), vocabulary_size, seed], sort_keys=True)
    else:
        content = files_digest(hparams.path)
        if hparams.digest not in (None, content):
            raise InputError(f"{hparams.path}: its files changed since the run was started; restore them")
    key = f"{hparams.dtype} {content}"
    if key not in _bases:
        while len(_bases) > 1:
            del _bases[next(iter(_bases))]
        _bases[key] = _load(hparams, vocabulary_size, seed)
    return _bases[key]


def _load(hparams: language_model.ModelSettings, vocabulary_size: int, seed: int) -> language_model.Params:
    auto, dtype = _transformers().AutoModelForCausalLM, getattr(torch, hparams.dtype)
    config, cpu = config_of(hparams, vocabulary_size), torch.device("cpu")
    with _quiet():
        if hparams.path is None:
            with shared_generators(cpu, seed, "base"):
                network = auto.from_config(config).to(dtype)
        else:
            try:
                network, loaded = auto.from_pretrained(
                    hparams.path, config=config, dtype=dtype, local_files_only=True, trust_remote_code=False,
                    use_safetensors=True, output_loading_info=True,
                )  # fmt: skip
            except (OSError, ValueError, RuntimeError) as error:
                raise InputError(f"{hparams.path}: transformers refuses the weights ({first_line(error)})") from error
            if missing := sorted(loaded["missing_keys"]):
                raise InputError(f"{hparams.path}: its files lack {missing[0]}; save the complete model there")
    return {name: value.detach() for name, value in network.state_dict().items()}


def _skeleton(config: Any) -> Any:
    """Return a network whose parameters have no memory, and whose buffers have their values."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with init_empty_weights(include_buffers=False):
        return _transformers().AutoModelForCausalLM.from_config(config).eval()


def _is_shapes_only() -> bool:
    """Return whether only the shapes of a model are asked for, in a block of torch.device("meta")."""
    return torch.empty(0).device.type == "meta"


def _has_matrix(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(layer, nn.Embedding)


def _inject(network: nn.Module, lora: language_model.LoraHParams) -> None:
    """Add the adapters to a network whose other parameters are frozen, in place."""
    try:
        _imported("peft").inject_adapter_in_model(_lora_config(lora), network)
    except ValueError as error:
        layers = sorted({name.rpartition(".")[2] for name, layer in network.named_modules() if _has_matrix(layer)})
        raise InputError(
            f"model.lora.targets {list(lora.targets)}: match no layer of the base; name some of {', '.join(layers)}"
        ) from error
    for name, value in network.named_parameters():
        if is_adapter(name):
            value.data = value.data.float()
            is_frozen = lora.freeze_a and ".lora_A." in name
            value.requires_grad_(not is_frozen)
            if is_frozen and not _is_shapes_only():
                value.data.copy_(_first_a(BASE_SEED, name, value))


def _lora_config(lora: language_model.LoraHParams) -> Any:
    targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    return _imported("peft").LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout, init_lora_weights=False
    )


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _first_a(seed: int, name: str, value: Tensor) -> Tensor:
    """Return A [r, inputs] as peft draws it: uniform up to inputs^(-1/2), Kaiming's bound with a = sqrt(5)."""
    bound = value.shape[1] ** -0.5
    values = stream(seed, "model", name.removeprefix("network.")).uniform(-bound, bound, tuple(value.shape))
    return torch.from_numpy(values)


def _token_map(file: str | None, vocabulary_size: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the model's id of each id of the corpus, int64 [V], and which ids of the corpus have no logit, bool [V].

    `file` has int64 values, little-endian; None if the ids are the same. If several special ids of the corpus have the
    same row of the model, of `size` ids, its logit belongs to the first of: a word or piece, EOS, BOS, OOV, PAD.
    """
    if file is None:
        return None, None
    ids = np.fromfile(file, "<i8")
    if len(ids) != vocabulary_size or ids.min() < 0 or ids.max() >= size:
        raise InputError(
            f"{file}: the corpus does not have the {size:,} tokens of the base; import it with the base's tokenizer"
        )
    eos, bos, oov = (vocabulary_size - back for back in (1, 2, 3))
    order = np.array([*range(1, oov), eos, bos, oov, 0])
    _, first = np.unique(ids[order], return_index=True)
    closed = np.ones(vocabulary_size, np.bool_)
    closed[order[first]] = False
    return torch.from_numpy(ids), torch.from_numpy(closed)


def _cache_of(config: Any, state: language_model.State | None) -> Any:
    """Return transformers' cache of keys and values; it appends to new tensors, so that a state stays as it is."""
    data = None if state is None else list(zip(state[::2], state[1::2], strict=True))
    cache = _transformers().DynamicCache(ddp_cache_data=data, config=config)
    if any(type(layer).__name__ != "DynamicLayer" for layer in cache.layers):
        raise InputError(f"model: {config.model_type} keeps more than keys and values, which is not supported here")
    return cache


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the warnings and the progress bars of transformers and peft off the screen."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def _transformers() -> Any:
    """Return transformers, without network and messages."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = _imported("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _imported(package: str) -> Any:
    try:
        if package == "peft":
            import peft

            return peft
        import transformers

        return transformers
    except ModuleNotFoundError as error:
        raise InputError(f'architecture "hf" needs {error.name}, which is not installed; {EXTRA}') from error
