"""Who sees whom in a packed row, told by one integer per token.

A query sees a key iff both belong to the same document (segment id equal and > 0) and the key is not later in it. With
`stride` at least the length of a row, `segment * stride + position` orders the tokens of a row by document, then by
position, so the keys that a query sees are an interval of that code: from its document's first to itself. The order of
the tokens in the row plays no part: contiguous and zigzag layouts, gathered and rotating keys all read the same test.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

# Padding takes codes that no comparison accepts: an empty interval for a query, a key below every document.
PADDING_LOW = np.int32(np.iinfo(np.int32).max)
PADDING_HIGH = np.int32(-2)
PADDING_KEY = np.int32(-1)

Keys = Int32[Array, "batch keys"]


class Queries(NamedTuple):
    """The interval of key codes that each query sees, both ends included."""

    low: Int32[Array, "batch queries"]
    high: Int32[Array, "batch queries"]


def query_bounds(segment_ids: Int[Array, "batch seq"], positions: Int[Array, "batch seq"], stride: int) -> Queries:
    """The interval of key codes that each token, as a query, sees.

    Args:
        segment_ids: 1, 2, ... per document of a row, 0 for padding. The largest times `stride` must stay below 2**31:
            a row of 65,536 tokens may hold 32,767 documents.
        positions: 0-based inside the document, below `stride`; anything where there is padding.
        stride: the length of the whole row (of all its shards), the same for queries and keys.
    """
    start = segment_ids.astype(jnp.int32) * stride
    real = segment_ids > 0
    return Queries(
        jnp.where(real, start, PADDING_LOW), jnp.where(real, start + positions.astype(jnp.int32), PADDING_HIGH)
    )


def key_codes(segment_ids: Int[Array, "batch seq"], positions: Int[Array, "batch seq"], stride: int) -> Keys:
    """The code of each token as a key; arguments as in `query_bounds`."""
    code = segment_ids.astype(jnp.int32) * stride + positions.astype(jnp.int32)
    return jnp.where(segment_ids > 0, code, PADDING_KEY)


def visible(queries: Queries, keys: Keys) -> Bool[Array, "batch queries keys"]:
    """True where a query sees a key."""
    codes = keys[..., None, :]
    return (queries.low[..., :, None] <= codes) & (codes <= queries.high[..., :, None])


def pad_queries(queries: Queries, multiple: int) -> Queries:
    """Appends padding until `multiple` divides the number of queries."""
    return Queries(
        _pad_tokens(queries.low, multiple, PADDING_LOW),
        _pad_tokens(queries.high, multiple, PADDING_HIGH),
    )


def pad_keys(keys: Keys, multiple: int) -> Keys:
    """Appends padding until `multiple` divides the number of keys."""
    return _pad_tokens(keys, multiple, PADDING_KEY)


def _pad_tokens(
    codes: Int32[Array, "batch tokens"], multiple: int, padding: np.int32
) -> Int32[Array, "batch padded_tokens"]:
    return jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % multiple)), constant_values=padding)
