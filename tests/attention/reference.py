"""Attention in float64 numpy, written from its definition, and rows of documents to try it on."""

from typing import NamedTuple

import numpy as np


class Example(NamedTuple):
    """q, k, v and d_out [batch, seq, heads, head_dim] float32; segments and positions [batch, seq] int32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    segments: np.ndarray
    positions: np.ndarray

    def reordered(self, order: np.ndarray) -> "Example":
        return Example(*(x[:, order] for x in self))


class Result(NamedTuple):
    """All of the shape of what they are named after; log_sum_exp [batch, heads, seq]."""

    out: np.ndarray
    log_sum_exp: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def attention_float64(example: Example) -> Result:
    """The definition, one query of one head at a time: a sum over the tokens of its document that are not later."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in example[:4])
    segments, positions = example.segments, example.positions
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    out, dq, dk, dv = np.zeros(q.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    log_sum_exp = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for row, query in np.argwhere(segments > 0):
        same = segments[row] == segments[row, query]
        seen = np.flatnonzero(same & (positions[row] <= positions[row, query]))
        for head in range(q.shape[2]):
            kv = head // group
            keys, values, gradient = k[row, seen, kv], v[row, seen, kv], d_out[row, query, head]
            scores = keys @ q[row, query, head] * scale
            total = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
            weights = np.exp(scores - total)
            log_sum_exp[row, head, query] = total
            out[row, query, head] = weights @ values
            # d softmax: each weight times how far its value exceeds the mean, in the direction of the gradient.
            d_scores = weights * (values @ gradient - out[row, query, head] @ gradient) * scale
            dq[row, query, head] = d_scores @ keys
            dk[row, seen, kv] += np.outer(d_scores, q[row, query, head])
            dv[row, seen, kv] += np.outer(weights, gradient)
    return Result(out, log_sum_exp, dq, dk, dv)


def assert_close(got, expected, out=2e-6, gradients=1e-5):
    """Against the definition, all of float32 but for the order of sums."""
    np.testing.assert_allclose(got.out, expected.out, atol=out)
    np.testing.assert_allclose(got.log_sum_exp, expected.log_sum_exp, atol=out, rtol=3e-7)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=gradients, err_msg=name)


def documents(*lengths: int, ids: tuple[int, ...] | None = None, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """One row: segment ids (1, 2, ... unless given) and positions of documents side by side, then padding."""
    segments, positions = np.zeros(seq, np.int32), np.zeros(seq, np.int32)
    start = 0
    for number, (length, segment) in enumerate(zip(lengths, ids or range(1, len(lengths) + 1), strict=True)):
        assert start + length <= seq, f"document {number} does not fit"
        segments[start : start + length] = segment
        positions[start : start + length] = np.arange(length)
        start += length
    return segments, positions


def hard_rows(seq: int, shards: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    """Four rows, each hard in its own way for a sequence cut into shards, or chunks of half a shard."""
    shard, chunk = seq // shards, seq // shards // 2
    return [
        documents(seq, seq=seq),  # over all shards
        # Boundaries one after a shard's edge, one before a chunk's, on an edge; documents of one token.
        documents(shard + 1, chunk - 2, 1, 1, seq - shard - chunk - 1, seq=seq),
        # Each document is one shard, so all that a shard gets from others is hidden; the second half is padding.
        documents(*[shard] * (shards // 2), seq=seq),
        # The first id comes back: its two documents see each other as far as positions allow.
        documents(chunk + 1, shard, chunk + 2, shard - 1, ids=(1, 2, 1, 3), seq=seq),
    ]


def example(
    rows: list[tuple[np.ndarray, np.ndarray]], heads: int = 6, kv_heads: int = 2, head_dim: int = 8, seed: int = 0
) -> Example:
    segments, positions = (np.stack(x) for x in zip(*rows, strict=True))
    random = np.random.default_rng(seed)
    arrays = (
        random.normal(size=(*segments.shape, h, head_dim)).astype(np.float32) for h in (heads, kv_heads, kv_heads)
    )
    d_out = random.normal(size=(*segments.shape, heads, head_dim)).astype(np.float32)
    return Example(*arrays, d_out, segments, positions)
