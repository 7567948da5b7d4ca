"""Tiny Hugging Face checkpoints, written with the safetensors package and independent of the code under test."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from tests.models.tiny import tiny_raw

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Tensors = dict[str, np.ndarray]

# Side files with bytes that reading as text and writing again would change.
SIDE_FILES = {
    "tokenizer.json": b'{"model": {"vocab": {"\xc4\xa0a": 1}}}\r\n',
    "tokenizer_config.json": b'{"eos_token":   "<|im_end|>"}',
    "chat_template.jinja": "{{ messages }} \N{EM DASH}".encode(),
    "generation_config.json": b'{"eos_token_id": [95, 96]}',
    "merges.txt": b"a b\n",
}


def random_tensors(
    raw: Mapping[str, Any], dtype: np.dtype | Callable[[str], np.dtype], seed: int, any_bits: bool = False
) -> Tensors:
    """All tensors of a model. `dtype` may depend on the name; `any_bits` draws bit patterns, NaNs and all."""
    random = np.random.default_rng(seed)
    hidden, mlp, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    head_dim = raw.get("head_dim") or hidden // raw["num_attention_heads"]
    query, key = raw["num_attention_heads"] * head_dim, raw["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(raw["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (query, hidden),
                "self_attn.q_proj.bias": (query,),
                "self_attn.k_proj.weight": (key, hidden),
                "self_attn.k_proj.bias": (key,),
                "self_attn.v_proj.weight": (key, hidden),
                "self_attn.v_proj.bias": (key,),
                "self_attn.o_proj.weight": (hidden, query),
                "post_attention_layernorm.weight": (hidden,),
                "mlp.gate_proj.weight": (mlp, hidden),
                "mlp.up_proj.weight": (mlp, hidden),
                "mlp.down_proj.weight": (hidden, mlp),
            }.items()
        }
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    tensors = {}
    for name, shape in shapes.items():
        kind = np.dtype(dtype(name) if callable(dtype) and not isinstance(dtype, type) else dtype)
        if any_bits:
            nbytes = int(np.prod(shape)) * kind.itemsize
            tensors[name] = np.frombuffer(random.bytes(nbytes), kind).reshape(shape)
        else:
            tensors[name] = random.standard_normal(shape, np.float32).astype(kind)
    return tensors


def write_checkpoint(
    directory: pathlib.Path, tensors: Mapping[str, np.ndarray], raw: Mapping[str, Any] | None = None, shards: int = 1
) -> pathlib.Path:
    """Writes tensors, config.json and side files; several shards get an index."""
    directory.mkdir(parents=True)
    names = sorted(tensors)
    if shards == 1:
        safetensors.numpy.save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            members = names[shard::shards]
            safetensors.numpy.save_file({name: tensors[name] for name in members}, directory / file)
            weight_map |= dict.fromkeys(members, file)
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(tiny_raw() if raw is None else raw, indent=1))
    for name, contents in SIDE_FILES.items():
        (directory / name).write_bytes(contents)
    return directory


def read_checkpoint(directory: pathlib.Path) -> Tensors:
    """All tensors of a Hugging Face directory through the safetensors package."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found = safetensors.numpy.load_file(file)
        assert not found.keys() & tensors.keys(), "a tensor is stored twice"
        tensors |= found
    return tensors


def assert_same_bytes(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert actual[name].tobytes() == tensor.tobytes(), name


def stacked_leaves(tensors: Mapping[str, np.ndarray], raw: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our parameter tree, by path, worked out here from what each axis means."""
    layers, heads, kv_heads = raw["num_hidden_layers"], raw["num_attention_heads"], raw["num_key_value_heads"]
    padding = -raw["vocab_size"] % 128

    def layer_stack(name: str) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{layer}.{name}"] for layer in range(layers)])

    def table(name: str) -> np.ndarray:
        return np.pad(tensors[name].astype(np.float32), ((0, padding), (0, 0))).astype(tensors[name].dtype)

    leaves = {
        "embed/table": table("model.embed_tokens.weight"),
        "norm/scale": tensors["model.norm.weight"],
        "layers/input_norm/scale": layer_stack("input_layernorm.weight"),
        "layers/post_attention_norm/scale": layer_stack("post_attention_layernorm.weight"),
        "layers/mlp/gate/kernel": np.swapaxes(layer_stack("mlp.gate_proj.weight"), 1, 2),
        "layers/mlp/up/kernel": np.swapaxes(layer_stack("mlp.up_proj.weight"), 1, 2),
        "layers/mlp/down/kernel": np.swapaxes(layer_stack("mlp.down_proj.weight"), 1, 2),
    }
    for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        weight = layer_stack(f"self_attn.{letter}_proj.weight")  # [layers, count * head_dim, hidden]
        split = np.swapaxes(weight, 1, 2).reshape(layers, weight.shape[2], count, -1)
        leaves[f"layers/attention/{letter}/kernel"] = split
        leaves[f"layers/attention/{letter}/bias"] = layer_stack(f"self_attn.{letter}_proj.bias").reshape(
            layers, count, -1
        )
    out = layer_stack("self_attn.o_proj.weight")  # [layers, hidden, heads * head_dim]
    leaves["layers/attention/out/kernel"] = np.swapaxes(out, 1, 2).reshape(layers, heads, -1, out.shape[1])
    if not raw["tie_word_embeddings"]:
        leaves["lm_head/table"] = table("lm_head.weight")
    return leaves
