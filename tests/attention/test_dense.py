import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.reference import attention_float64, documents, example, hard_rows
from vibethinker_jax.attention import dense
from vibethinker_jax.attention.block_map import Blocks
from vibethinker_jax.attention.dense import dense_attention, matmul_precision
from vibethinker_jax.attention.visibility import key_codes, query_bounds, visible

SEQ = 40


def causal_mask(given):
    return visible(*(code(given.segments, given.positions, SEQ) for code in (query_bounds, key_codes)))


@jax.jit
def attend_with_derivative(given):
    given = jax.tree.map(jnp.asarray, given)
    mask = causal_mask(given)
    out, derivative = jax.vjp(lambda q, k, v: dense_attention(q, k, v, mask), *given[:3])
    return out, derivative(given.d_out.astype(out.dtype))


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1)])
def test_attention_and_its_automatic_derivative_equal_the_definition(heads):
    given = example(hard_rows(SEQ), *heads)
    expected = attention_float64(given)
    out, gradients = attend_with_derivative(given)
    np.testing.assert_allclose(out, expected.out, atol=2e-6)
    for got, want in zip(gradients, expected[2:], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_query_without_keys_returns_zero_and_has_no_gradient():
    given = example([documents(seq=SEQ), documents(3, seq=SEQ)])
    out, gradients = attend_with_derivative(given)
    np.testing.assert_array_equal(np.asarray(out)[given.segments == 0], 0)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(np.asarray(gradient)[given.segments == 0], 0)


def test_bfloat16_stays_close_and_float32_is_multiplied_exactly():
    given = example(hard_rows(SEQ))
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in given[:3]]
    out, _ = attend_with_derivative(given._replace(**dict(zip("qkv", rounded, strict=True))))
    assert out.dtype == jnp.bfloat16
    expected = attention_float64(given._replace(**dict(zip("qkv", (np.float32(x) for x in rounded), strict=True))))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected.out, atol=0.02)
    assert matmul_precision(jnp.float32) == jax.lax.Precision.HIGHEST
    assert matmul_precision(jnp.bfloat16) == jax.lax.Precision.DEFAULT


def test_both_forms_are_the_same_function():
    given = example(hard_rows(SEQ))
    codes = jnp.asarray(given.segments), jnp.asarray(given.positions), SEQ
    out, _ = jax.jit(dense.forward, static_argnames="blocks")(
        *(x.swapaxes(1, 2) for x in given[:3]), query_bounds(*codes), key_codes(*codes), blocks=Blocks(8, 8)
    )
    np.testing.assert_allclose(out.swapaxes(1, 2), attend_with_derivative(given)[0], atol=1e-6)
