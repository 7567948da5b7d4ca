import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vibethinker_jax.attention.attend import attend, document_mask
from vibethinker_jax.attention.dense import dense_attention, matmul_precision
from vibethinker_jax.errors import UserError


def oracle(q, k, v, mask):
    """float64 softmax attention, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, queries, heads, width = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape)
    for b in range(batch):
        for i in range(queries):
            seen = np.flatnonzero(mask[b, i])
            for h in range(heads):
                if len(seen):
                    scores = k[b, seen, h // group] @ q[b, i, h] / np.sqrt(width)
                    weights = np.exp(scores - scores.max())
                    out[b, i, h] = weights @ v[b, seen, h // group] / weights.sum()
    return out


def random_qkv(seed, batch=3, seq=40, heads=6, kv_heads=2, width=8, scale=1.0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(batch, seq, h, width) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q * scale, k, v


def packed_rows():
    segments = np.array(
        [np.repeat(s, n) for s, n in [([1, 2, 0], (20, 13, 7)), ([1, 2, 3], (1, 38, 1)), ([0, 0], (39, 1))]]
    )
    positions = np.zeros_like(segments)
    for row, ids in enumerate(segments):
        for segment in np.unique(ids):
            positions[row, ids == segment] = np.arange((ids == segment).sum())
    return segments, positions


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_attention_equals_the_float64_oracle(heads, scale):
    q, k, v = random_qkv(0, heads=heads[0], kv_heads=heads[1], scale=scale)
    segments, positions = packed_rows()
    mask = np.asarray(document_mask(segments, positions))
    out = attend(q, k, v, jnp.asarray(segments), jnp.asarray(positions))
    np.testing.assert_allclose(out, oracle(q, k, v, mask), atol=2e-5 if scale == 1 else 2e-4)


def test_padding_returns_zero_and_its_gradient_is_finite():
    q, k, v = random_qkv(1)
    segments, positions = packed_rows()
    out, gradients = jax.value_and_grad(
        lambda qkv: jnp.sum(attend(*qkv, jnp.asarray(segments), jnp.asarray(positions)) ** 2)
    )((q, k, v))
    assert np.isfinite(out)
    assert all(np.isfinite(g).all() for g in gradients)
    rows = np.asarray(attend(q, k, v, jnp.asarray(segments), jnp.asarray(positions)))
    np.testing.assert_array_equal(rows[segments == 0], 0)
    np.testing.assert_array_equal(np.asarray(gradients[0])[segments == 0], 0)


def test_the_mask_is_causal_inside_each_document_and_follows_positions():
    segments, positions = np.array([[1, 1, 2, 2, 0]]), np.array([[0, 1, 0, 1, 0]])
    expected = np.zeros((5, 5), bool)
    expected[0, 0] = expected[1, 0] = expected[1, 1] = expected[2, 2] = expected[3, 2] = expected[3, 3] = True
    np.testing.assert_array_equal(document_mask(segments, positions)[0], expected)
    order = np.array([3, 0, 4, 2, 1])
    permuted = document_mask(segments[:, order], positions[:, order])[0]
    np.testing.assert_array_equal(permuted, expected[np.ix_(order, order)])


def test_bfloat16_stays_close_and_float32_is_multiplied_exactly():
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(2))
    mask = np.tril(np.ones((40, 40), bool))[None].repeat(3, 0)
    out = dense_attention(q, k, v, jnp.asarray(mask))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), oracle(q, k, v, mask), atol=0.03)
    assert matmul_precision(jnp.float32) == jax.lax.Precision.HIGHEST
    assert matmul_precision(jnp.bfloat16) == jax.lax.Precision.DEFAULT


def test_an_unknown_backend_is_refused_by_name():
    q, k, v = random_qkv(3, seq=4)
    with pytest.raises(UserError, match="'flash'"):
        attend(q, k, v, jnp.ones((3, 4), int), jnp.ones((3, 4), int), backend="flash")
