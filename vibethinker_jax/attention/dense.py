"""Attention by explicit scores: the reference for every faster backend, exact on any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def dense_attention(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    mask: Bool[Array, "batch queries keys"],
) -> Float[Array, "batch queries heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the keys that the mask allows.

    Scores and softmax are float32; K and V are never repeated for grouped queries (query head h reads KV head
    h // (heads / kv_heads)). A query that may see no key returns zero.

    Args:
        q, k, v: one dtype, which is also the result's.
        mask: True where a query may see a key.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    precision = matmul_precision(q.dtype)
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, -jnp.inf)
    # A row without any key has maximum -inf; exponentiate against 0 there to get zeros rather than NaN.
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = (weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(v.dtype)
    out = jnp.einsum("bkgqs,bskd->bqkgd", probabilities, v, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(batch, queries, heads, head_dim).astype(q.dtype)


def matmul_precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision:
    """Full precision for float32 operands: a TPU otherwise multiplies them as bfloat16."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT
