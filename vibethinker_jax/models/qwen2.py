"""The Qwen2 decoder in Flax NNX.

Modules are thin: each holds the arrays of its part of the parameter tree (models/parameters.py) under the same
names and says how they are used. `build` wraps a tree of parameters, also inside jit; the layers of the tree are
stacked and scanned, so compile time does not grow with depth.

Two ways through the decoder share every line but the attention:
  model(tokens, positions, segment_ids)      packed documents, for training and log-probabilities;
  model.extend(tokens, cache, start)         new tokens after a key-value cache, for prefill (many) and decoding (one).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from vibethinker_jax.attention.attend import attend
from vibethinker_jax.attention.dense import dense_attention, matmul_precision
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params
from vibethinker_jax.parallel.rules import UNPLACED, Placement

REMAT_POLICIES = ("none", "full")

# (q, k, v) after rotary embedding -> (attention output, whatever the caller wants back from each layer)
Mixer = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class KVCache(NamedTuple):
    """Keys and values of tokens seen so far, float[layers, batch, length, kv_heads, head_dim] each."""

    k: jax.Array
    v: jax.Array


def init_cache(config: Qwen2Config, batch: int, length: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """An empty cache for `batch` sequences of at most `length` tokens."""
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, computed in float32 and rounded before the scale, as Qwen2 does."""

    def __init__(self, params: Params, eps: float) -> None:
        self.scale = nnx.Param(params["scale"])
        self.eps = eps

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...].astype(x.dtype)


class Kernel(nnx.Module):
    """A matrix, contracted as the einsum says; float32 accumulation, result in the input's dtype."""

    def __init__(self, params: Params, einsum: str) -> None:
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None
        self.einsum = einsum

    def __call__(self, x: jax.Array) -> jax.Array:
        out = jnp.einsum(
            self.einsum,
            x,
            self.kernel[...].astype(x.dtype),
            precision=matmul_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with biased q, k, v projections and rotary embedding."""

    def __init__(self, params: Params, placement: Placement) -> None:
        self.q = Kernel(params["q"], "bsd,dhk->bshk")
        self.k = Kernel(params["k"], "bsd,dhk->bshk")
        self.v = Kernel(params["v"], "bsd,dhk->bshk")
        self.out = Kernel(params["out"], "bshk,hkd->bsd")
        self.placement = placement

    def __call__(self, x: Float[Array, "batch seq hidden"], rotation: "Rotation", mix: Mixer) -> tuple[jax.Array, Any]:
        q = self.placement.constrain(rotate(self.q(x), rotation), "batch", "sequence", "heads", None)
        k = self.placement.constrain(rotate(self.k(x), rotation), "batch", "sequence", "kv_heads", None)
        v = self.placement.constrain(self.v(x), "batch", "sequence", "kv_heads", None)
        mixed, extra = mix(q, k, v)
        return self.out(self.placement.constrain(mixed, "batch", "sequence", "heads", None)), extra


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, params: Params, placement: Placement) -> None:
        self.gate = Kernel(params["gate"], "bsd,df->bsf")
        self.up = Kernel(params["up"], "bsd,df->bsf")
        self.down = Kernel(params["down"], "bsf,fd->bsd")
        self.placement = placement

    def __call__(self, x: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq hidden"]:
        inner = jax.nn.silu(self.gate(x)) * self.up(x)
        return self.down(self.placement.constrain(inner, "batch", "sequence", "mlp"))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, params: Params, config: Qwen2Config, placement: Placement) -> None:
        self.input_norm = RMSNorm(params["input_norm"], config.rms_norm_eps)
        self.attention = Attention(params["attention"], placement)
        self.post_attention_norm = RMSNorm(params["post_attention_norm"], config.rms_norm_eps)
        self.mlp = MLP(params["mlp"], placement)
        self.placement = placement

    def __call__(self, x: Float[Array, "batch seq hidden"], rotation: "Rotation", mix: Mixer) -> tuple[jax.Array, Any]:
        attended, extra = self.attention(self.input_norm(x), rotation, mix)
        x = x + attended
        x = x + self.mlp(self.post_attention_norm(x))
        return self.placement.constrain(x, "batch", "sequence", None), extra


class Table(nnx.Module):
    """Vocabulary rows: an embedding, an output head, or both."""

    def __init__(self, params: Params) -> None:
        self.table = nnx.Param(params["table"])


class Qwen2(nnx.Module):
    """The decoder around a tree of parameters; see the module docstring."""

    def __init__(
        self,
        config: Qwen2Config,
        params: Params,
        placement: Placement = UNPLACED,
        compute_dtype: jax.typing.DTypeLike = jnp.float32,
        remat: str = "none",
    ) -> None:
        if remat not in REMAT_POLICIES:
            raise UserError(f"remat policy is {remat!r}; choose one of {', '.join(REMAT_POLICIES)}")
        self.config = config
        self.placement = placement
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        self.embed = Table(params["embed"])
        self.layers = DecoderLayer(params["layers"], config, placement)  # every array has a leading axis of layers
        self.norm = RMSNorm(params["norm"], config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Table(params["lm_head"])

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq hidden"]:
        """Hidden states after the final norm, in the compute dtype, of packed rows.

        Args:
            tokens: ids below vocab_size.
            positions: place of each token in its document; 0, 1, 2, ... by default.
            segment_ids: 1, 2, ... per document of a row, 0 for padding (whose output means nothing); one document
                without padding by default.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)

        def layer(x: jax.Array, stacked: tuple[Params]) -> tuple[jax.Array, None]:
            def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
                return attend(q, k, v, segment_ids, positions, placement=self.placement), None

            return nnx.merge(definition, stacked[0])(x, rotation, mix)

        definition, state = nnx.split(self.layers)
        rotation = rotary(positions, self.config)
        body = jax.checkpoint(layer, prevent_cse=False) if self.remat == "full" else layer
        x, _ = jax.lax.scan(body, self._embed(tokens), (state,))
        return self.norm(x)

    def extend(
        self, tokens: Int[Array, "batch new"], cache: KVCache, start: Int[Array, " batch"]
    ) -> tuple[Float[Array, "batch new hidden"], KVCache]:
        """Hidden states of new tokens that follow what the cache holds, and the cache with them added.

        Row b's tokens are written at cache positions start[b] .. start[b] + new - 1 and see the cache up to
        themselves. Whatever lies after `start` in the cache (padding of an earlier chunk, a previous owner's
        tokens) is overwritten or unseen.

        Args:
            tokens: ids below vocab_size.
            cache: has room for start + new tokens of every row. Nothing checks that: the caller has to.
            start: tokens of each row that are in the cache already.
        """
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        visible = jnp.arange(cache.k.shape[2])[None, None, :] <= positions[:, :, None]
        rows = jnp.arange(tokens.shape[0])[:, None]

        def write(array: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
            at = array.at[index, rows, positions]
            return at.set(
                new.astype(array.dtype), unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
            )

        # The cache is carried through the layers, not scanned over: it is then updated in place, never copied.
        def layer(
            carry: tuple[jax.Array, KVCache], stacked: tuple[Params, jax.Array]
        ) -> tuple[tuple[jax.Array, KVCache], None]:
            x, before = carry
            layer_state, index = stacked

            def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KVCache]:
                after = KVCache(write(before.k, index, k), write(before.v, index, v))
                keys, values = (jax.lax.dynamic_index_in_dim(a, index, keepdims=False).astype(q.dtype) for a in after)
                return dense_attention(q, keys, values, visible), after

            return nnx.merge(definition, layer_state)(x, rotation, mix), None

        definition, state = nnx.split(self.layers)
        rotation = rotary(positions, self.config)
        layers = state, jnp.arange(self.config.num_layers)
        (x, cache), _ = jax.lax.scan(layer, (self._embed(tokens), cache), layers)
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... padded_vocab"]:
        """float32 logits; -inf for the padding rows of the vocabulary."""
        table = self.head_table.astype(hidden.dtype)
        out = jnp.einsum(
            "...d,vd->...v", hidden, table, precision=matmul_precision(hidden.dtype), preferred_element_type=jnp.float32
        )
        return jnp.where(jnp.arange(table.shape[0]) < self.config.vocab_size, out, -jnp.inf)

    @property
    def head_table(self) -> Float[Array, "padded_vocab hidden"]:
        """The output head: its own table, or the embedding when tied."""
        return (self.embed if self.lm_head is None else self.lm_head).table[...]

    def _embed(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq hidden"]:
        x = self.embed.table[...].astype(self.compute_dtype)[tokens]
        return self.placement.constrain(x, "batch", "sequence", None)


def build(
    config: Qwen2Config,
    params: Params,
    placement: Placement = UNPLACED,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
) -> Qwen2:
    """The model around a tree of parameters. Cheap, and usable inside jit with traced parameters."""
    return Qwen2(config, params, placement, compute_dtype, remat)


def get_params(model: Qwen2) -> Params:
    """The model's parameters as a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles, float32[batch, seq, 1, head_dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def rotary(positions: Int[Array, "batch seq"], config: Qwen2Config) -> Rotation:
    """Rotary angles positions * theta^(-2i / head_dim), in float32.

    The frequencies are rounded to float32 before they meet the positions, as where the weights were trained: an angle
    of hundreds of radians makes any other order of rounding visible in the logits.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "batch seq heads head_dim"], rotation: Rotation) -> Float[Array, "batch seq heads head_dim"]:
    """Applies the rotary embedding: component i is paired with i + head_dim / 2 (Qwen2's convention)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
