"""Settings of tiny networks of transformers, by its names."""

GPT2: dict[str, object] = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
