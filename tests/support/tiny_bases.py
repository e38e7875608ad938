"""Settings of tiny networks of the transformers library, with the names that the library uses."""

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

GPT2: dict[str, object] = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


def norms_in_float64(patch: pytest.MonkeyPatch) -> None:
    """Let Llama's RMSNorm compute in the type of its input; in transformers it computes in float32."""

    def forward(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
        scaled: Tensor = norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return scaled

    patch.setattr(LlamaRMSNorm, "forward", forward)
