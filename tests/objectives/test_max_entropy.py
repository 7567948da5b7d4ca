"""MGPO's prompt weight: numbers by hand, ends of the range, and what must hold for every accuracy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives import max_entropy_weight


def test_weights_of_eight_samples_by_hand():
    # exp(-KL) = (1/2) p^-p (1-p)^-(1-p); at p = 1/4: 2 * 3^(-3/4), at p = 1/8: 4 * 7^(-7/8)
    accuracy = np.array([0.0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0])
    expected = np.array([0.5, 4 * 7 ** (-7 / 8), 2 * 3 ** (-3 / 4), 1.0, 2 * 3 ** (-3 / 4), 0.5])
    np.testing.assert_allclose(max_entropy_weight(accuracy, 1.0), expected, rtol=1e-14)
    np.testing.assert_allclose(max_entropy_weight(accuracy, 2.0), expected**2, rtol=1e-14)
    np.testing.assert_allclose(max_entropy_weight(jnp.asarray(accuracy), 1.0), expected, rtol=1e-6)


def test_gamma_zero_weighs_every_prompt_one():
    assert max_entropy_weight(np.array([0.0, 0.3, 1.0]), 0.0).tolist() == [1.0, 1.0, 1.0]


def test_value_and_gradient_are_finite_at_the_ends():
    grad = jax.vmap(jax.grad(lambda p: max_entropy_weight(p, 1.5)))(jnp.array([0.0, 1e-7, 0.5, 1.0]))
    assert np.isfinite(grad).all()
    assert float(grad[2]) == 0.0
    assert max_entropy_weight(jnp.array([0.0, 1.0]), 1.5).tolist() == pytest.approx([2**-1.5, 2**-1.5])


def test_gradient_by_hand():
    # dw/dp = -gamma w log(p / (1 - p)); at p = 1/4, gamma = 2: w = 4 * 3^(-3/2), log(1/3)
    grad = jax.grad(lambda p: max_entropy_weight(p, 2.0))(jnp.float32(0.25))
    assert float(grad) == pytest.approx(2 * 4 * 3**-1.5 * math.log(3), rel=1e-6)


@given(p=st.floats(0, 1), gamma=st.floats(0, 8))
def test_weight_is_symmetric_and_between_its_ends(p, gamma):
    weight = float(max_entropy_weight(np.array([p]), gamma)[0])
    assert 2**-gamma * (1 - 1e-12) <= weight <= 1 + 1e-12
    assert weight == pytest.approx(float(max_entropy_weight(np.array([1 - p]), gamma)[0]), rel=1e-9)


def test_what_is_not_a_share_gives_nan():
    assert np.isnan(max_entropy_weight(np.array([-0.1, 1.1, np.nan]), 1.0)).all()


def test_negative_gamma_is_refused():
    with pytest.raises(UserError, match="gamma is -1"):
        max_entropy_weight(np.array([0.5]), -1)
