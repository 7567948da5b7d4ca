"""Mismatch correction, filters and metrics on ratios small enough to work out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives import Metrics, RejectionFilters, mismatch_metrics
from vibethinker_jax.objectives.importance import k3, log_ratio, rejected, truncated_importance_weight
from vibethinker_jax.objectives.segments import per_token, segment_sums

LOG2 = math.log(2)


def test_weights_are_capped_above_only_and_constant_for_differentiation():
    lr = jnp.array([[math.log(0.25), 0.0, LOG2, math.log(5)]])
    np.testing.assert_allclose(truncated_importance_weight(lr, 2.0), [[0.25, 1, 2, 2]], rtol=1e-6)
    np.testing.assert_allclose(truncated_importance_weight(lr, 10.0), [[0.25, 1, 2, 5]], rtol=1e-6)
    assert truncated_importance_weight(lr, None).tolist() == [[1, 1, 1, 1]]
    assert not jax.grad(lambda lr: truncated_importance_weight(lr, 2.0).sum())(lr).any()


def test_log_ratio_is_clamped_and_marks_what_the_sampler_did_not_report():
    old = jnp.array([[-1.0, -0.5, -1.0, -2.0, -900.0, -1.0]])
    rollout = jnp.array([[-1.5, -0.5, -jnp.inf, jnp.nan, -1.0, -900.0]])
    lr, finite = log_ratio(old, rollout)
    assert lr.tolist() == [[0.5, 0.0, 0.0, 0.0, -20.0, 20.0]]
    assert finite.tolist() == [[True, True, False, False, True, True]]


def test_a_trainer_probability_that_is_not_finite_stays_visible():
    lr, finite = log_ratio(jnp.array([[-jnp.inf, jnp.nan]]), jnp.array([[-1.0, -1.0]]))
    assert np.isnan(lr).all()
    assert finite.all()
    weights, ids = jnp.ones((1, 2)), jnp.ones((1, 2), jnp.int32)
    every = RejectionFilters(token_band=(0.5, 2), geometric_band=(0.99, 1.01), k3_limit=0.01, veto=1e-4)
    assert not rejected(lr, weights, ids, 1, every).any()
    assert math.isnan(mismatch_metrics(lr, weights).summary()["mismatch/k1"])


# Two responses and padding in one row, one response in the other; ratios of powers of two.
SEGMENTS = jnp.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
RATIOS = LOG2 * jnp.array([[1.0, -1.0, 0.0, 3.0, 0.0, 9.0], [-14.0, 0.0, 1.0, 0.0, 9.0, 9.0]])
WEIGHTS = (SEGMENTS > 0).astype(jnp.float32)


def which(**filters):
    refused = rejected(RATIOS, WEIGHTS, SEGMENTS, 3, RejectionFilters(**filters))
    return jnp.where(WEIGHTS > 0, refused, False).astype(int).tolist()


def test_nothing_is_rejected_by_default():
    assert which() == [[0] * 6, [0] * 6]


def test_token_band_rejects_tokens():
    assert which(token_band=(0.4, 4.0)) == [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_geometric_band_rejects_responses():
    # mean log2 r: (1 - 1)/2 = 0; 3/3 = 1; (-14 + 1)/4 = -3.25
    assert which(geometric_band=(0.9, 1.1)) == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert which(geometric_band=(0.9, 2.1)) == [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]


def test_k3_limit_rejects_responses():
    # means of r - 1 - log r: (1 - log 2 + log 2 - 1/2)/2 = 0.25; (7 - 3 log 2)/3 = 1.640; (8.704 + 0.307)/4 = 2.253
    assert which(k3_limit=0.3) == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert which(k3_limit=1.7) == [[0] * 6, [1, 1, 1, 1, 0, 0]]
    assert which(k3_limit=2.3) == [[0] * 6, [0] * 6]


def test_veto_rejects_the_response_of_a_tiny_ratio():
    assert which(veto=1e-4) == [[0] * 6, [1, 1, 1, 1, 0, 0]]  # 2^-14 = 6.1e-5
    assert which(veto=6e-5) == [[0] * 6, [0] * 6]


def test_unweighted_positions_do_not_reach_a_response():
    ratios = RATIOS.at[0, 3].set(jnp.nan)
    weights = WEIGHTS.at[0, 3].set(0.0)
    every = RejectionFilters(geometric_band=(0.9, 1.1), k3_limit=0.3, veto=1e-4)
    refused = rejected(ratios, weights, SEGMENTS, 3, every)
    assert refused[0, jnp.array([0, 1, 2, 4])].tolist() == [False] * 4  # the second response is left with ratios of 1


def test_k3_keeps_its_digits_near_zero():
    lr = np.array([0.0, 1e-8, -1e-6, 1e-4, -0.0999, 0.0999, 0.1001, -0.5, 3.0])
    exact = np.expm1(lr.astype(np.longdouble)) - lr.astype(np.longdouble)
    series = lr**2 / 2 * (1 + lr / 3 * (1 + lr / 4))  # where even long double cancels
    expected = np.where(np.abs(lr) < 1e-3, series, exact).astype(float)
    np.testing.assert_allclose(k3(jnp.asarray(lr, jnp.float32)), expected, rtol=1e-5, atol=0)


def test_metrics_by_hand():
    # r = 1/2, 1, 4 over three tokens, cap 2; the last two positions hold rubbish.
    lr = jnp.array([[-LOG2, 0.0, 2 * LOG2, jnp.nan, 7.0]])
    weights = jnp.array([[1.0, 1, 1, 0, 0]])
    expected = {
        "mismatch/k1": -LOG2 / 3,
        "mismatch/k3": (LOG2 - 0.5 + 3 - 2 * LOG2) / 3,
        "mismatch/chi_square": (0.25 + 1 + 16) / 3 - 1,
        "mismatch/absolute": LOG2,
        "mismatch/ratio": 5.5 / 3,
        "mismatch/above_cap": 1 / 3,
        "mismatch/effective_samples": 5.5**2 / (3 * 17.25),
        "mismatch/ratio_max": 4.0,
        "mismatch/absolute_max": 2 * LOG2,
    }
    whole = mismatch_metrics(lr, weights, cap=2.0)
    assert whole.summary() == pytest.approx(expected, rel=1e-5)
    parts = [mismatch_metrics(lr[:, i : i + 2], weights[:, i : i + 2], cap=2.0) for i in (0, 2, 4)]
    assert parts[0].add(parts[1]).add(parts[2]).summary() == pytest.approx(expected, rel=1e-5)


def test_metrics_of_nothing_are_nan_and_add_nothing():
    lr = jnp.array([[1.0, 0.5]])
    nothing, something = mismatch_metrics(lr, jnp.zeros((1, 2))), mismatch_metrics(lr, jnp.ones((1, 2)))
    assert all(math.isnan(value) for value in nothing.summary().values())
    assert nothing.add(something).summary() == something.summary()


def test_chi_square_keeps_its_digits_when_the_mismatch_is_tiny():
    summary = mismatch_metrics(jnp.full((1, 4), 1e-5), jnp.ones((1, 4))).summary()
    assert summary["mismatch/chi_square"] == pytest.approx(2e-5, rel=1e-4)
    assert summary["mismatch/k3"] == pytest.approx(5e-11, rel=1e-4)


def test_metrics_keep_names_that_only_one_side_has():
    left, right = Metrics(means={"a": (1.0, 2.0)}), Metrics(means={"b": (3.0, 4.0)}, maxima={"c": 5.0})
    assert left.add(right).summary() == {"a": 0.5, "b": 0.75, "c": 5.0}


def test_metrics_pass_through_jit_and_scan():
    def step(total, x):
        return total.add(Metrics(means={"a": (x, 1.0)}, maxima={"b": x})), None

    start = Metrics(means={"a": (jnp.float32(0), jnp.float32(0))}, maxima={"b": jnp.float32(-jnp.inf)})
    total, _ = jax.jit(lambda xs: jax.lax.scan(step, start, xs))(jnp.array([1.0, 5.0, 3.0]))
    assert total.summary() == {"a": 3.0, "b": 5.0}


def test_sums_per_document_and_back():
    sums = segment_sums(jnp.arange(12.0).reshape(2, 6), SEGMENTS, 3)
    assert sums.tolist() == [[1.0, 9.0, 0.0], [30.0, 0.0, 0.0]]
    assert per_token(sums, SEGMENTS).tolist() == [[1, 1, 9, 9, 9, 0], [30, 30, 30, 30, 0, 0]]
    assert np.isnan(per_token(sums[:, :1], SEGMENTS)).tolist() == (SEGMENTS > 1).tolist()


@pytest.mark.parametrize(
    "bad",
    [
        {"token_band": (0.0, 2.0)},
        {"token_band": (2.0, 0.5)},
        {"geometric_band": (-1.0, 1.0)},
        {"k3_limit": 0.0},
        {"veto": -1.0},
    ],
)
def test_impossible_filters_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        RejectionFilters(**bad)


def test_a_cap_that_is_not_positive_is_refused():
    with pytest.raises(UserError, match="cap is 0"):
        truncated_importance_weight(jnp.zeros((1, 1)), 0)
