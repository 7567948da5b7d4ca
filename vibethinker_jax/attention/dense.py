"""Attention by explicit scores: the reference for every faster backend, exact on any device.

`dense_attention` takes any mask (the rollouts' cache needs one); `forward` and `backward` are the same mathematics in
the form that every backend of packed rows has (see `backends`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from vibethinker_jax.attention.block_map import Blocks
from vibethinker_jax.attention.contract import Attended, Gradients, KeyHeads, PerQuery, QueryHeads
from vibethinker_jax.attention.visibility import Keys, Queries, visible


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


def forward(
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    queries: Queries,
    keys: Keys,
    *,
    blocks: Blocks,
) -> Attended:
    """Attention over the visible keys and each query's log-sum-exp of scaled scores; `blocks` is not used.

    A query that sees no key has output 0 and log-sum-exp -inf.
    """
    del blocks
    precision = matmul_precision(q.dtype)
    scores = _scores(_group(q, k), k)
    scores = jnp.where(visible(queries, keys)[:, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = (weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(v.dtype)
    out = jnp.einsum("bkgqs,bksd->bkgqd", probabilities, v, precision=precision, preferred_element_type=jnp.float32)
    log_sum_exp = highest + jnp.log(total)
    return out.reshape(q.shape), log_sum_exp.reshape(q.shape[:3])


def backward(
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    queries: Queries,
    keys: Keys,
    d_out: QueryHeads,
    log_sum_exp: PerQuery,
    delta: PerQuery,
    *,
    blocks: Blocks,
) -> Gradients:
    """The gradients that these keys account for; `blocks` is not used.

    Args:
        log_sum_exp: over all keys that the query sees, of which these may be a part.
        delta: sum(d_out * out) over head_dim, with the output over all keys.
    """
    del blocks
    precision = matmul_precision(q.dtype)
    grouped, d_grouped = _group(q, k), _group(d_out, k)
    # A query without any key subtracts +inf: its probabilities are 0 wherever it looks.
    subtracted = jnp.where(log_sum_exp == -jnp.inf, jnp.inf, log_sum_exp).reshape(grouped.shape[:4])[..., None]
    probabilities = jnp.exp(_scores(grouped, k) - subtracted)
    probabilities = jnp.where(visible(queries, keys)[:, None, None], probabilities, 0.0)
    d_probabilities = jnp.einsum(
        "bkgqd,bksd->bkgqs", d_grouped, v, precision=precision, preferred_element_type=jnp.float32
    )
    d_scores = probabilities * (d_probabilities - delta.reshape(subtracted.shape)) * q.shape[-1] ** -0.5
    probabilities, d_scores = probabilities.astype(q.dtype), d_scores.astype(q.dtype)
    dq = jnp.einsum("bkgqs,bksd->bkgqd", d_scores, k, precision=precision, preferred_element_type=jnp.float32)
    dk = jnp.einsum("bkgqs,bkgqd->bksd", d_scores, grouped, precision=precision, preferred_element_type=jnp.float32)
    dv = jnp.einsum(
        "bkgqs,bkgqd->bksd", probabilities, d_grouped, precision=precision, preferred_element_type=jnp.float32
    )
    return dq.reshape(q.shape), dk, dv


def _group(
    per_head: Float[Array, "batch heads queries head_dim"], k: Float[Array, "batch kv_heads keys head_dim"]
) -> Float[Array, "batch kv_heads group queries head_dim"]:
    """Splits the query heads by the KV head that they read."""
    batch, _, queries, head_dim = per_head.shape
    return per_head.reshape(batch, k.shape[1], -1, queries, head_dim)


def _scores(
    grouped: Float[Array, "batch kv_heads group queries head_dim"], k: Float[Array, "batch kv_heads keys head_dim"]
) -> Float32[Array, "batch kv_heads group queries keys"]:
    precision = matmul_precision(k.dtype)
    scores = jnp.einsum("bkgqd,bksd->bkgqs", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    return scores * k.shape[-1] ** -0.5


def matmul_precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision:
    """Full precision for float32 operands: a TPU otherwise multiplies them as bfloat16."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT
