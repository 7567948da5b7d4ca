"""Tokens and responses that leave MGPO's loss, on both sides of the fraction; errors that must not leave silently."""

import math

import numpy as np
import pytest

from tests.objectives.packed import loss_and_grad, packed_groups
from vibethinker_jax.objectives import RejectionFilters


def two_responses(drop=None, value=0.0, keep_column=True, **options):
    """Responses of three and two tokens; `drop` gets rollout log-prob `value`, or is not a response token at all."""
    rng = np.random.default_rng(5)
    old = -rng.random((1, 7)).astype(np.float32)
    current = old + 0.1 * rng.normal(size=old.shape).astype(np.float32)
    rollout = old + 0.1 * rng.normal(size=old.shape).astype(np.float32)
    ids = np.array([[1, 1, 1, 2, 2, 0, 0]], np.int32)
    response = (ids > 0).astype(np.float32)
    for column in drop or []:
        if keep_column:
            rollout[0, column] = value
        else:
            response[0, column] = 0.0
    advantages, weights = np.array([[1.0, -2.0]], np.float32), np.array([[0.5, 0.5]], np.float32)
    return loss_and_grad(current, old, rollout, response, ids, advantages, weights, **options)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_a_rollout_probability_that_is_not_finite_drops_the_token_from_both_sides(value, aggregation):
    dropped, grad = two_responses([1], value, aggregation=aggregation)
    absent, expected = two_responses([1], keep_column=False, aggregation=aggregation)
    assert float(dropped.loss_sum) == float(absent.loss_sum)
    assert float(dropped.denominator) == float(absent.denominator)
    assert grad.tolist() == expected.tolist()
    assert grad[0, 1] == 0.0
    assert grad[0, 0] != 0.0
    assert dropped.metrics.summary()["mismatch/not_finite"] == pytest.approx(1 / 5)
    assert dropped.metrics.summary()["mismatch/k3"] == absent.metrics.summary()["mismatch/k3"]


def test_a_response_of_which_nothing_is_left_contributes_zero():
    whole, _ = two_responses()
    output, grad = two_responses([3, 4], np.nan)
    alone, _ = two_responses([3, 4], keep_column=False)
    assert float(output.loss_sum) == float(alone.loss_sum) != float(whole.loss_sum)
    assert not grad[0, 3:].any()
    nothing, grad = two_responses([0, 1, 2, 3, 4], np.nan)
    assert float(nothing.loss_sum) == 0.0
    assert not grad.any()
    assert math.isnan(nothing.metrics.summary()["policy/ratio"])


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_rejected_tokens_leave_the_denominator_too(aggregation):
    band = RejectionFilters(token_band=(0.5, 2.0))
    output, grad = two_responses([1, 4], -9.0, aggregation=aggregation, filters=band)  # r of about e^8.5
    absent, expected = two_responses([1, 4], keep_column=False, aggregation=aggregation)
    assert float(output.loss_sum) == float(absent.loss_sum)
    assert float(output.denominator) == float(absent.denominator)
    assert grad.tolist() == expected.tolist()
    assert output.metrics.summary()["mismatch/rejected"] == pytest.approx(2 / 5)
    assert output.metrics.summary()["mismatch/ratio_max"] > 1000  # measured before filtering


def test_a_vetoed_response_is_rejected_whole():
    output, grad = two_responses([4], 30.0, aggregation="token_mean", filters=RejectionFilters(veto=1e-4))
    assert float(output.denominator) == 3.0
    assert grad[0, :3].all()
    assert not grad[0, 3:].any()


def test_whatever_stands_outside_the_kept_tokens_reaches_nothing():
    packed, _ = packed_groups(gamma=1.0)
    expected, gradient = loss_and_grad(*packed.arguments(), entropy=np.ones_like(packed.old))
    for array in (packed.log_probs, packed.old, packed.rollout):
        array[packed.response == 0] = np.nan
    clean = np.where(packed.response > 0, 1.0, np.nan).astype(np.float32)
    output, grad = loss_and_grad(*packed.arguments(), entropy=clean)
    assert float(output.loss_sum) == float(expected.loss_sum) != 0.0
    assert grad.tolist() == gradient.tolist()
    assert output.metrics.summary() == expected.metrics.summary()
    assert output.metrics.summary()["policy/entropy"] == 1.0


def test_rows_of_padding_alone_give_zero():
    zeros, segments = np.zeros((2, 5), np.float32), np.zeros((2, 3), np.float32)
    output, grad = loss_and_grad(zeros, zeros, zeros, np.ones_like(zeros), zeros.astype(np.int32), segments, segments)
    assert (float(output.loss_sum), float(output.denominator)) == (0.0, 0.0)
    assert not grad.any()


def test_a_response_of_weight_zero_leaves_the_token_mean():
    # Masked truncated: the response of three tokens has sequence weight 0.
    zeros = np.zeros((1, 6), np.float32)
    ids, response = np.array([[1, 1, 2, 2, 2, 0]], np.int32), np.array([[0, 1, 1, 1, 1, 0]], np.float32)
    advantages, weights = np.array([[1.0, -2.0]], np.float32), np.array([[0.5, 0.0]], np.float32)
    for aggregation, expected in (("token_mean", (-1.0, 1.0)), ("sequence_mean", (-0.5, 0.5))):
        output, grad = loss_and_grad(zeros, zeros, zeros, response, ids, advantages, weights, aggregation=aggregation)
        assert (float(output.loss_sum), float(output.denominator)) == expected
        assert not grad[0, 2:].any()


def test_a_segment_without_a_column_makes_the_loss_nan():
    packed, _ = packed_groups()
    packed.ids[1, 0] = 5  # only four columns
    output, _ = loss_and_grad(*packed.arguments())
    assert math.isnan(output.loss_sum)


@pytest.mark.parametrize("name", ["log_probs", "old"])
def test_an_infinite_probability_of_the_trainer_makes_the_loss_nan(name):
    packed, unpacked = packed_groups()
    row, span, _ = unpacked[0][0]
    vars(packed)[name][row, span.start] = -np.inf
    filters = RejectionFilters(token_band=(0.01, 100.0), veto=1e-4, geometric_band=(0.01, 100.0))
    for options in ({}, {"tis_cap": None}, {"filters": filters}):
        output, _ = loss_and_grad(*packed.arguments(), **options)
        assert math.isnan(output.loss_sum)
