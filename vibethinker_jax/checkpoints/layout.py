"""Hugging Face tensors against our parameters: names and axis orders, in one table.

Hugging Face stores a linear layer as [out, in], one tensor per layer, with the heads of a projection flattened into
one axis. Ours are [in, out], heads apart, with the layers of a kind stacked along a leading axis.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vibethinker_jax.models.config import Qwen2Config


@dataclass(frozen=True)
class TensorKind:
    """One entry of our parameter tree and the tensors it is made of.

    Attributes:
        path: in our tree, joined by slashes.
        name: of the Hugging Face tensor; `{layer}` stands for the layer's number.
        layout: axes there -> axes here, without the layer axis. Axes in parentheses are flattened into one.
            `vocab` has vocab_size rows there and, filled up with zeros, padded_vocab_size rows here.
    """

    path: str
    name: str
    layout: str

    @property
    def stacked(self) -> bool:
        """Whether there is one tensor per layer."""
        return "{layer}" in self.name

    @cached_property
    def _axes(self) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
        """((axes flattened into one, ...) there, axes here)."""
        there, here = self.layout.split(" -> ")
        groups = [tuple((flattened or single).split()) for flattened, single in re.findall(r"\((.*?)\)|(\S+)", there)]
        return tuple(groups), tuple(here.split())

    def hf_shape(self, config: Qwen2Config) -> tuple[int, ...]:
        """Shape of one Hugging Face tensor."""
        sizes = axis_sizes(config)
        return tuple(math.prod(sizes[axis] for axis in group) for group in self._axes[0])

    def leaf_shape(self, config: Qwen2Config) -> tuple[int, ...]:
        """Shape of the array in our tree, with the layer axis and the padding of the vocabulary."""
        sizes = axis_sizes(config) | {"vocab": config.padded_vocab_size}
        shape = tuple(sizes[axis] for axis in self._axes[1])
        return (config.num_layers, *shape) if self.stacked else shape

    def hf_names(self, config: Qwen2Config) -> list[str]:
        """Names of the Hugging Face tensors, by layer."""
        return [self.name.format(layer=layer) for layer in range(config.num_layers if self.stacked else 1)]

    def from_hf(self, tensor: np.ndarray, config: Qwen2Config) -> np.ndarray:
        """A view of one Hugging Face tensor, or of some rows of a `vocab` one, with our axes."""
        there, here = self._axes
        flat = [axis for group in there for axis in group]
        sizes = axis_sizes(config) | {"vocab": -1}
        return tensor.reshape([sizes[axis] for axis in flat]).transpose([flat.index(axis) for axis in here])

    def to_hf(self, array: np.ndarray, config: Qwen2Config) -> np.ndarray:
        """The inverse of `from_hf`; contiguous."""
        there, here = self._axes
        flat = [axis for group in there for axis in group]
        sizes = axis_sizes(config) | {"vocab": -1}
        shape = [math.prod(sizes[axis] for axis in group) for group in there]
        return np.ascontiguousarray(array.transpose([here.index(axis) for axis in flat]).reshape(shape))


def _stacked(path: str, name: str, layout: str) -> TensorKind:
    return TensorKind(f"layers/{path}", f"model.layers.{{layer}}.{name}", layout)


_TABLE = "vocab hidden -> vocab hidden"
_INTO_HEADS = "({0} head_dim) hidden -> hidden {0} head_dim"
_HEAD_BIAS = "({0} head_dim) -> {0} head_dim"
_KINDS = (
    TensorKind("embed/table", "model.embed_tokens.weight", _TABLE),
    _stacked("input_norm/scale", "input_layernorm.weight", "hidden -> hidden"),
    _stacked("attention/q/kernel", "self_attn.q_proj.weight", _INTO_HEADS.format("heads")),
    _stacked("attention/q/bias", "self_attn.q_proj.bias", _HEAD_BIAS.format("heads")),
    _stacked("attention/k/kernel", "self_attn.k_proj.weight", _INTO_HEADS.format("kv_heads")),
    _stacked("attention/k/bias", "self_attn.k_proj.bias", _HEAD_BIAS.format("kv_heads")),
    _stacked("attention/v/kernel", "self_attn.v_proj.weight", _INTO_HEADS.format("kv_heads")),
    _stacked("attention/v/bias", "self_attn.v_proj.bias", _HEAD_BIAS.format("kv_heads")),
    _stacked("attention/out/kernel", "self_attn.o_proj.weight", "hidden (heads head_dim) -> heads head_dim hidden"),
    _stacked("post_attention_norm/scale", "post_attention_layernorm.weight", "hidden -> hidden"),
    _stacked("mlp/gate/kernel", "mlp.gate_proj.weight", "mlp hidden -> hidden mlp"),
    _stacked("mlp/up/kernel", "mlp.up_proj.weight", "mlp hidden -> hidden mlp"),
    _stacked("mlp/down/kernel", "mlp.down_proj.weight", "hidden mlp -> mlp hidden"),
    TensorKind("norm/scale", "model.norm.weight", "hidden -> hidden"),
)
_HEAD = TensorKind("lm_head/table", "lm_head.weight", _TABLE)


def tensor_kinds(config: Qwen2Config) -> tuple[TensorKind, ...]:
    """All kinds of a model, with the head only where it is not tied to the embedding."""
    return _KINDS if config.tie_word_embeddings else (*_KINDS, _HEAD)


def axis_sizes(config: Qwen2Config) -> Mapping[str, int]:
    """Sizes of the axes that layouts name, as Hugging Face has them (vocabulary not padded)."""
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
