"""The one entry to attention over packed rows."""

import jax
from jaxtyping import Array, Bool, Float, Int

from vibethinker_jax.attention.dense import dense_attention
from vibethinker_jax.errors import UserError
from vibethinker_jax.parallel.rules import UNPLACED, Placement

BACKENDS = ("dense",)


def document_mask(
    segment_ids: Int[Array, "batch seq"], positions: Int[Array, "batch seq"]
) -> Bool[Array, "batch seq seq"]:
    """True where query token i may see key token j: same document, not padding, and j not later than i.

    Order comes from `positions`, not from the place in the row, so a permuted row (context parallelism) has the
    permuted mask.
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same & (segment_ids > 0)[:, :, None] & (positions[:, None, :] <= positions[:, :, None])


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    segment_ids: Int[Array, "batch seq"],
    positions: Int[Array, "batch seq"],
    *,
    placement: Placement = UNPLACED,
    backend: str = "dense",
) -> jax.Array:
    """Causal attention inside each document of a packed row; padding (segment id 0) returns zero.

    With a sequence sharded over `context`, keys and values are gathered over that axis and queries stay sharded.

    Args:
        segment_ids: 1, 2, ... per document of a row, 0 for padding.
        positions: position of each token inside its document.
        placement: where the arrays live.
        backend: one of BACKENDS.
    """
    if backend not in BACKENDS:
        raise UserError(f"attention backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    k = placement.constrain(k, "batch", None, "kv_heads", None)
    v = placement.constrain(v, "batch", None, "kv_heads", None)
    return dense_attention(q, k, v, document_mask(segment_ids, positions))
