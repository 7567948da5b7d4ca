"""The Qwen2 decoder in Flax NNX.

Modules are thin: each holds the arrays of its part of the parameter tree (models/parameters.py) under the same
names and says how they are used. `build` wraps a tree of parameters, also inside jit; the layers of the tree are
stacked and scanned, so compile time does not grow with depth.

Two ways through the decoder share every line but the attention:
  model(tokens, positions, segment_ids)      packed documents, for training and log-probabilities;
  model.extend(tokens, cache, start)         new tokens after a key-value cache, for prefill (many) and decoding (one).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from vibethinker_jax.attention.attend import LOG_SUM_EXP_NAME, OUT_NAME, AttentionConfig, attend
from vibethinker_jax.attention.dense import dense_attention, matmul_precision
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.embedding import embed
from vibethinker_jax.models.gathering import gather_layer, mlp_chunk, pin_to_layer
from vibethinker_jax.models.parameters import Params
from vibethinker_jax.parallel.rules import UNPLACED, Placement

# What the backward pass of a layer computes again: nothing; everything but attention; everything; or what `block` does,
# with what that keeps, and the input of every layer, in host memory.
REMAT_POLICIES = ("none", "block", "full", "offload")

LAYER_INPUT_NAME = "layer_input"
AUTO = AttentionConfig()

# (q, k, v) after rotary embedding -> (attention output, whatever the caller wants back from each layer)
Mixer = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
FeedForward = Callable[[jax.Array], jax.Array]  # in place of a layer's own MLP


class KVCache(NamedTuple):
    """Keys and values of tokens seen so far, float[layers, batch, length, kv_heads, head_dim] each."""

    k: jax.Array
    v: jax.Array


def init_cache(config: Qwen2Config, batch: int, length: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """An empty cache for `batch` sequences of at most `length` tokens."""
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 and rounded once before the scale and once after, as in Qwen2."""

    def __init__(self, params: Params, eps: float) -> None:
        self.scale = nnx.Param(params["scale"])
        self.eps = eps

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        rounded = normed.astype(x.dtype).astype(jnp.float32)
        return (rounded * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Kernel(nnx.Module):
    """A matrix, contracted as the einsum says; float32 accumulation, result in `out_dtype` or the input's dtype."""

    def __init__(self, params: Params, einsum: str) -> None:
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None
        self.einsum = einsum

    def __call__(self, x: jax.Array, out_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        out = jnp.einsum(
            self.einsum,
            x,
            self.kernel[...].astype(x.dtype),
            precision=matmul_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(out_dtype or x.dtype)


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

    def __call__(
        self, x: Float[Array, "batch seq hidden"], out_dtype: jax.typing.DTypeLike | None = None
    ) -> Float[Array, "batch seq hidden"]:
        inner = jax.nn.silu(self.gate(x)) * self.up(x)
        return self.down(self.placement.constrain(inner, "batch", "sequence", "mlp"), out_dtype)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, params: Params, config: Qwen2Config, placement: Placement) -> None:
        self.input_norm = RMSNorm(params["input_norm"], config.rms_norm_eps)
        self.attention = Attention(params["attention"], placement)
        self.post_attention_norm = RMSNorm(params["post_attention_norm"], config.rms_norm_eps)
        self.mlp = MLP(params["mlp"], placement)
        self.placement = placement

    def __call__(
        self,
        x: Float[Array, "batch seq hidden"],
        rotation: "Rotation",
        mix: Mixer,
        feed_forward: FeedForward | None = None,
    ) -> tuple[jax.Array, Any]:
        attended, extra = self.attention(self.input_norm(x), rotation, mix)
        x = x + attended
        x = x + (feed_forward or self.mlp)(self.post_attention_norm(x))
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
        attention: AttentionConfig = AUTO,
        mlp_chunks: int = 1,
    ) -> None:
        if remat not in REMAT_POLICIES:
            raise UserError(f"remat policy is {remat!r}; choose one of {', '.join(REMAT_POLICIES)}")
        self.config = config
        self.placement = placement
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        self.attention = attention
        if mlp_chunks < 1 or config.intermediate_size % mlp_chunks:
            raise UserError(
                f"mlp_chunks is {mlp_chunks}; choose a divisor of the MLP's width {config.intermediate_size}"
            )
        # Cut over `tensor` the MLP is smaller already, and its chunks would not lie where its shards do.
        self.mlp_chunks = mlp_chunks if placement.size("tensor") == 1 else 1
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

        def layer(x: jax.Array, stacked: tuple[jax.Array, Params]) -> tuple[jax.Array, None]:
            x = checkpoint_name(x, LAYER_INPUT_NAME)
            index, weights = stacked
            weights = pin_to_layer(weights, index, self.config, self.compute_dtype)
            if self.mlp_chunks > 1:
                local = weights.pop("mlp")
                feed_forward = partial(self._chunked_mlp, local)
                gathered = {**self._gather(weights), "mlp": local}
            else:
                feed_forward, gathered = None, self._gather(weights)

            def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
                return attend(q, k, v, segment_ids, positions, placement=self.placement, config=self.attention), None

            return DecoderLayer(gathered, self.config, self.placement)(x, rotation, mix, feed_forward)

        rotation = rotary(positions, self.config)
        layers = jnp.arange(self.config.num_layers), get_params(self.layers)
        x, _ = jax.lax.scan(rematerialised(layer, self.remat), self._embed(tokens), layers)
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

    def _gather(self, weights: Params) -> Params:
        return gather_layer(weights, self.config, self.placement, self.compute_dtype)

    def _chunked_mlp(self, mlp: Params, x: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq hidden"]:
        """The MLP, a part of its inner width at a time: so much less of it is in memory, forward and backward."""

        @partial(jax.checkpoint, prevent_cse=False)
        def part(index: jax.Array) -> jax.Array:
            kernels = mlp_chunk(mlp, index, self.config, self.mlp_chunks)
            return MLP(self._gather({"mlp": kernels})["mlp"], self.placement)(x, jnp.float32)

        # The sum stays outside of what is recomputed: as an argument of it, it would have to be recomputed too.
        def add(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return total + part(index), None

        total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), jnp.arange(self.mlp_chunks))
        return total.astype(x.dtype)

    def _embed(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq hidden"]:
        return embed(self.embed.table[...], tokens, self.placement, self.compute_dtype)


def build(
    config: Qwen2Config,
    params: Params,
    placement: Placement = UNPLACED,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
    attention: AttentionConfig = AUTO,
    mlp_chunks: int = 1,
) -> Qwen2:
    """The model around a tree of parameters. Cheap, and usable inside jit with traced parameters."""
    return Qwen2(config, params, placement, compute_dtype, remat, attention, mlp_chunks)


def rematerialised(layer: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """The layer with its backward pass as a policy of REMAT_POLICIES says."""
    if policy == "none":
        return layer
    kept = {
        "block": jax.checkpoint_policies.save_only_these_names(OUT_NAME, LOG_SUM_EXP_NAME),
        "full": jax.checkpoint_policies.nothing_saveable,
        "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[OUT_NAME, LOG_SUM_EXP_NAME, LAYER_INPUT_NAME],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    return jax.checkpoint(layer, prevent_cse=False, policy=kept[policy])


def get_params(model: nnx.Module) -> Params:
    """A module's parameters as a nested dict of arrays."""
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
