"""Tiny Qwen2 shapes for tests; sizes differ so that a swapped axis cannot pass."""

from typing import Any

from vibethinker_jax.models.config import Qwen2Config


def tiny_raw(**changes: Any) -> dict[str, Any]:
    """A config.json of a three-layer model with 6 query and 2 KV heads and 97 words."""
    raw = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }
    return {**raw, **changes}


def tiny_config(**changes: Any) -> Qwen2Config:
    """The configuration of `tiny_raw`."""
    return Qwen2Config.from_hf(tiny_raw(**changes), source="tiny config.json")
