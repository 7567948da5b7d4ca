"""MGPO's loss on packed rows: by hand where it is small, against an independently written GRPO where it is not."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.objectives.packed import loss_and_grad, packed_groups, textbook_grpo
from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives import RejectionFilters, mgpo_loss


def single(log_ratios, advantage, *, mismatch=None, **options):
    """One response that fills a row: rho = exp(log_ratios) and r = exp(mismatch), sequence weight 1."""
    old = np.full((1, len(log_ratios)), -1.0, np.float32)
    rollout = old - (0.0 if mismatch is None else np.array([mismatch], np.float32))
    ones = np.ones_like(old)
    rest = (rollout, ones, ones.astype(np.int32), np.array([[advantage]], np.float32), np.ones((1, 1), np.float32))
    return loss_and_grad(old + np.array([log_ratios], np.float32), old, *rest, **options)


# --- the surrogate ---


@pytest.mark.parametrize(
    ("rho", "advantage", "surrogate", "slope"),
    [
        # inside the band: rho A, slope rho A
        (0.9, 2.0, 1.8, 1.8),
        (1.0, 2.0, 2.0, 2.0),
        (1.1, -2.0, -2.2, -2.2),
        (1.0, -2.0, -2.0, -2.0),
        # above it: A > 0 is capped at 1.2 A without gradient, A < 0 keeps pushing back
        (1.5, 2.0, 2.4, 0.0),
        (1.5, -2.0, -3.0, -3.0),
        # below it: A < 0 is capped at 0.8 A without gradient, A > 0 keeps pulling up
        (0.5, -2.0, -1.6, 0.0),
        (0.5, 2.0, 1.0, 1.0),
    ],
)
def test_clipping_for_both_signs_of_the_advantage(rho, advantage, surrogate, slope):
    output, grad = single([math.log(rho)], advantage)
    assert float(output.loss_sum) == pytest.approx(-surrogate, rel=1e-6)
    assert float(grad[0, 0]) == pytest.approx(-slope, rel=1e-6)
    clipped = slope == 0.0
    assert output.metrics.summary()["policy/clip_fraction"] == clipped
    assert output.metrics.summary()["policy/ratio"] == pytest.approx(rho, rel=1e-6)


@pytest.mark.parametrize("rho", [0.5, 1.5])
def test_without_an_advantage_nothing_counts_as_clipped(rho):
    output, grad = single([math.log(rho)], 0.0)
    assert float(output.loss_sum) == float(grad[0, 0]) == 0.0
    assert output.metrics.summary()["policy/clip_fraction"] == 0.0


def test_the_band_may_be_asymmetric():
    output, grad = single([math.log(1.25)], 1.0, clip_high=0.28)
    assert float(output.loss_sum) == pytest.approx(-1.25, rel=1e-6)
    output, grad = single([math.log(1.5)], 1.0, clip_high=0.28)
    assert float(output.loss_sum) == pytest.approx(-1.28, rel=1e-6)
    assert not grad.any()


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_the_weighted_policy_gradient():
    # r = 1/4, 1, 5 under cap 2: TIS 1/4, 1, 2; the mean over three tokens of A = -1.5.
    log_probs = jnp.array([[-0.7, -3.1, -0.01]])
    rollout = log_probs - jnp.log(jnp.array([[0.25, 1.0, 5.0]]))
    ones = jnp.ones((1, 3))

    def loss(log_probs, cap):
        output = mgpo_loss(
            log_probs,
            jax.lax.stop_gradient(log_probs),
            rollout,
            ones,
            ones.astype(int),
            jnp.array([[-1.5]]),
            jnp.array([[0.5]]),
            clip_low=0.0,  # an empty band: inert all the same
            clip_high=0.0,
            tis_cap=cap,
        )
        return output.loss_sum, output

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    for cap, weights in ((2.0, [0.25, 1, 2]), (10.0, [0.25, 1, 5]), (None, [1, 1, 1])):
        grad, output = run(log_probs, cap)
        assert output.metrics.summary()["policy/ratio"] == 1.0
        np.testing.assert_allclose(grad[0], -0.5 * -1.5 * np.array(weights) / 3, rtol=1e-5)
        assert float(output.loss_sum) == pytest.approx(0.5 * 1.5 * sum(weights) / 3, rel=1e-5)
        assert output.metrics.summary().get("mismatch/above_cap") == {2.0: pytest.approx(1 / 3), 10.0: 0.0}.get(cap)


def test_correction_multiplies_the_clipped_term():
    # rho = 1.5 clipped to 1.2, r = 8 capped to 2: 2.4
    output, grad = single([math.log(1.5)], 1.0, mismatch=[math.log(8)])
    assert float(output.loss_sum) == pytest.approx(-2.4, rel=1e-6)
    assert not grad.any()


def test_a_second_update_on_the_same_batch_measures_ratios_from_the_first_policy():
    # Three tokens move by +0.1, +0.3 and -0.3 in the first update; old stays: rho = e^0.1, e^0.3 (clipped), e^-0.3.
    output, grad = single([0.1, 0.3, -0.3], 1.0)
    rho = np.exp([0.1, 0.3, -0.3])
    assert float(output.loss_sum) == pytest.approx(-(rho[0] + 1.2 + rho[2]) / 3, rel=1e-6)
    np.testing.assert_allclose(grad[0], [-rho[0] / 3, 0, -rho[2] / 3], rtol=1e-6)


def test_only_the_current_policy_is_differentiated():
    old = jnp.full((1, 2), -1.0)
    rest = (jnp.ones((1, 2)), jnp.ones((1, 2), int), jnp.ones((1, 1)), jnp.ones((1, 1)))
    grads = jax.grad(lambda o, r: mgpo_loss(old + 0.1, o, r, *rest).loss_sum, argnums=(0, 1))(old, old - 0.2)
    assert not any(grad.any() for grad in grads)


def test_absurd_ratios_stay_finite():
    output, grad = single([200.0, -200.0], -1.0, mismatch=[300.0, -300.0])
    assert np.isfinite(output.loss_sum)
    assert np.isfinite(grad).all()
    summary = output.metrics.summary()
    assert all(np.isfinite(value) for value in summary.values())


# --- aggregation over responses ---


def lengths_one_and_three(**options):
    """A row with a response of one token (A = 1) and one of three (A = -2), each of weight 1/2, and padding."""
    zeros = np.zeros((1, 6), np.float32)
    ids = np.array([[1, 1, 2, 2, 2, 0]], np.int32)
    response = np.array([[0, 1, 1, 1, 1, 0]], np.float32)
    advantages, weights = np.array([[1.0, -2.0, 0.0]], np.float32), np.array([[0.5, 0.5, 0.0]], np.float32)
    return loss_and_grad(zeros, zeros, zeros, response, ids, advantages, weights, **options)


def test_sequence_mean_and_token_mean_on_unequal_lengths():
    # eq. 3: -(1/2)(1) - (1/2)(-2) = 1/2 over one group; token mean: -(1 - 2 - 2 - 2) = 5 over four tokens
    output, grad = lengths_one_and_three()
    assert (float(output.loss_sum), float(output.denominator)) == (0.5, 1.0)
    np.testing.assert_allclose(grad, [[0, -0.5, 1 / 3, 1 / 3, 1 / 3, 0]], rtol=1e-6)
    output, grad = lengths_one_and_three(aggregation="token_mean")
    assert (float(output.loss_sum), float(output.denominator)) == (5.0, 4.0)
    assert grad.tolist() == [[0, -1, 2, 2, 2, 0]]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("token_mean", [False, True])
def test_gamma_zero_equals_textbook_grpo(seed, token_mean):
    packed, unpacked = packed_groups(seed)
    output, grad = loss_and_grad(*packed.arguments(), aggregation="token_mean" if token_mean else "sequence_mean")
    loss, gradient = textbook_grpo(packed, unpacked, token_mean=token_mean)
    assert float(output.loss_sum / output.denominator) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(np.asarray(grad / output.denominator), gradient, rtol=1e-4, atol=1e-7)
    assert output.metrics.summary()["policy/clip_fraction"] > 0
    assert output.metrics.summary()["mismatch/above_cap"] > 0


def test_all_wrong_half_right_and_all_right_prompts():
    # w = 1/2, 1, 1/2, but without a difference in reward nothing reaches the policy; the denominator counts all three.
    rewards = np.array([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]], float)
    packed, unpacked = packed_groups(gamma=1.0, rewards=rewards)
    output, grad = loss_and_grad(*packed.arguments())
    assert float(output.denominator) == 3.0
    for group, learns in zip(unpacked, (False, True, False), strict=True):
        assert any(np.asarray(grad)[row, span].any() for row, span, _ in group) is learns


def test_gamma_scales_the_gradient_of_a_prompt_by_its_weight():
    rewards = np.array([[0, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 1]], float)
    plain, unpacked = packed_groups(gamma=0.0, rewards=rewards)
    weighted, _ = packed_groups(gamma=2.0, rewards=rewards)
    before, after = (np.asarray(loss_and_grad(*batch.arguments())[1]) for batch in (plain, weighted))
    # p = 1/4, 1/2, 3/4: w = 4 * 3^(-3/2), 1, 4 * 3^(-3/2)
    for group, w in zip(unpacked, (4 * 3**-1.5, 1.0, 4 * 3**-1.5), strict=True):
        for row, span, _ in group:
            np.testing.assert_allclose(after[row, span], w * before[row, span], rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_equal_rewards_give_exactly_zero(aggregation):
    packed, _ = packed_groups(rewards=np.full((3, 3), 0.1), samples=3)  # their mean is not 0.1
    output, grad = loss_and_grad(*packed.arguments(), aggregation=aggregation)
    assert float(output.loss_sum) == 0.0
    assert not grad.any()


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_micro_batches_add_up_to_the_batch(aggregation):
    packed, _ = packed_groups(gamma=1.0)
    whole, grad = loss_and_grad(*packed.arguments(), aggregation=aggregation)
    parts = [
        loss_and_grad(*packed.rows(rows).arguments(), aggregation=aggregation) for rows in (slice(0, 1), slice(1, 4))
    ]
    assert sum(float(part.loss_sum) for part, _ in parts) == pytest.approx(float(whole.loss_sum), rel=1e-5, abs=1e-6)
    assert sum(float(part.denominator) for part, _ in parts) == pytest.approx(float(whole.denominator), rel=1e-6)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), grad, rtol=1e-5, atol=1e-8)
    added = parts[0][0].metrics.add(parts[1][0].metrics).summary()
    assert added == pytest.approx(whole.metrics.summary(), rel=1e-5, abs=1e-7)


# --- placement, settings ---


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_sharded_equals_unsharded(aggregation):
    packed, _ = packed_groups(gamma=1.0)
    filters = RejectionFilters(geometric_band=(0.8, 1.25))
    expected, gradient = loss_and_grad(*packed.arguments(), aggregation=aggregation, filters=filters)
    devices = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("fsdp", "context"))
    tokens, segments = NamedSharding(devices, P("fsdp", "context")), NamedSharding(devices, P("fsdp"))
    placed = [jax.device_put(x, tokens if x.shape[1] == 40 else segments) for x in packed.arguments()]
    output, grad = loss_and_grad(*placed, aggregation=aggregation, filters=filters)
    assert 0 < expected.metrics.summary()["mismatch/rejected"] < 1
    assert float(output.loss_sum) == pytest.approx(float(expected.loss_sum), rel=1e-5)
    np.testing.assert_allclose(grad, gradient, rtol=1e-5, atol=1e-8)
    assert output.metrics.summary() == pytest.approx(expected.metrics.summary(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"aggregation": "mean"}, "aggregation is 'mean'"),
        ({"clip_low": 1.5}, "clip_low, clip_high are 1.5"),
        ({"clip_high": -0.1}, "clip_low, clip_high are 0.2, -0.1"),
        ({"tis_cap": 0.0}, "cap is 0.0"),
    ],
)
def test_bad_settings_are_named(options, named):
    with pytest.raises(UserError, match=named.replace(".", "[.]")):
        single([0.0], 1.0, **options)
