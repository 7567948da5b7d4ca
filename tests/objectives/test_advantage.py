"""Group statistics by hand: which samples count where, and what a group without information does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives import group_advantages

EPS = 1e-6


def binary(rows, **options):
    rewards = np.array(rows, float)
    return group_advantages(rewards, rewards, np.ones(rewards.shape, bool), **({"gamma": 1.0} | options))


def test_all_wrong_half_right_and_all_right_by_hand():
    groups = binary([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
    # p = 0, 1/2, 1 and w = 1/2, 1, 1/2; in the middle mean 1/2, population std 1/2: A = +-(1/2) / (1/2 + 1e-6)
    a = 0.5 / (0.5 + EPS)
    np.testing.assert_allclose(groups.advantages, [[0] * 4, [a, -a, -a, a], [0] * 4], rtol=1e-14)
    np.testing.assert_allclose(groups.weight, [0.5, 1.0, 0.5], rtol=1e-14)
    assert groups.accuracy.tolist() == [0.0, 0.5, 1.0]
    assert (groups.sample_weights == 0.25).all()
    assert groups.kept.all()
    assert groups.num_kept == 3
    summary = groups.metrics.summary()
    assert summary["groups/all_wrong"] == summary["groups/all_correct"] == pytest.approx(1 / 3)
    assert summary["groups/without_signal"] == pytest.approx(2 / 3)
    assert summary["groups/accuracy"] == 0.5
    assert summary["groups/dropped"] == 0.0


def test_advantages_carry_the_prompt_weight():
    # p = 1/4, mean 1/4, std sqrt(3)/4: A = (3/4)/(std + eps), -(1/4)/(std + eps); w = 2 * 3^(-3/4), squared at gamma 2
    std = np.sqrt(3) / 4 + EPS
    expected = (2 * 3**-0.75) ** 2 * np.array([-0.25, -0.25, 0.75, -0.25]) / std
    np.testing.assert_allclose(binary([[0, 0, 1, 0]], gamma=2.0).advantages[0], expected, rtol=1e-13)
    np.testing.assert_allclose(
        binary([[0, 0, 1, 0]], gamma=0.0).advantages[0], [-0.25 / std] * 2 + [0.75 / std, -0.25 / std]
    )


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e9])
def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to(reward):
    rewards = np.full((1, 3), reward)
    groups = group_advantages(rewards, np.ones((1, 3)), np.ones((1, 3), bool), gamma=1.0)
    assert groups.advantages.tolist() == [[0.0, 0.0, 0.0]]
    assert groups.kept.all()  # it stays in the denominator


def test_a_sample_without_verdict_leaves_every_statistic():
    rewards = np.array([[1.0, np.nan, 0.0, 0.0]])
    correct = np.array([[1.0, np.nan, 0.0, 0.0]])
    groups = group_advantages(rewards, correct, np.array([[True, False, True, True]]), gamma=0.0)
    alone = binary([[1, 0, 0]], gamma=0.0)
    np.testing.assert_array_equal(groups.advantages[0, [0, 2, 3]], alone.advantages[0])
    assert groups.advantages[0, 1] == groups.sample_weights[0, 1] == 0.0
    assert groups.accuracy[0] == 1 / 3
    assert groups.sample_weights[0, 0] == 1 / 3
    assert groups.metrics.summary()["samples/without_verdict"] == 0.25


def test_a_group_with_fewer_than_two_verdicts_is_dropped_and_counted():
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    valid = np.array([[True, False, False], [False, False, False], [True, True, True]])
    groups = group_advantages(rewards, rewards, valid, gamma=1.0)
    assert groups.kept.tolist() == [False, False, True]
    assert groups.num_kept == 1
    assert not groups.advantages[:2].any()
    assert not groups.sample_weights[:2].any()
    assert groups.metrics.summary()["groups/dropped"] == pytest.approx(2 / 3)
    assert groups.metrics.summary()["groups/accuracy"] == pytest.approx(2 / 3)  # of the kept group alone


def test_groups_without_defined_correctness_take_weight_one():
    rewards = np.array([[0.2, 0.6], [0.0, 1.0]])
    correct = np.array([[np.nan, np.nan], [0.0, 1.0]])
    groups = group_advantages(rewards, correct, np.ones((2, 2), bool), gamma=3.0)
    assert groups.weight.tolist() == [1.0, 1.0]
    assert np.isnan(groups.accuracy[0])
    np.testing.assert_allclose(groups.advantages[0], np.array([-0.2, 0.2]) / (0.2 + EPS), rtol=1e-13)
    assert groups.metrics.summary()["groups/accuracy"] == 0.5


def test_masked_truncated_samples_count_as_incorrect_and_train_nothing():
    rewards = np.array([[1.0, 1.0, 0.0, 1.0]])
    truncated = np.array([[False, True, False, False]])
    groups = binary(rewards, gamma=0.0, truncated=truncated, mask_truncated=True)
    # as rewards (1, 0, 0, 1): mean 1/2, std 1/2
    np.testing.assert_allclose(groups.advantages[0], np.array([1, -1, -1, 1]) * 0.5 / (0.5 + EPS), rtol=1e-14)
    assert groups.accuracy[0] == 0.5
    assert groups.sample_weights.tolist() == [[0.25, 0.0, 0.25, 0.25]]
    assert groups.metrics.summary()["samples/masked"] == 0.25
    unmasked = binary(rewards, gamma=0.0, truncated=truncated)
    assert unmasked.accuracy[0] == 0.75
    assert (unmasked.sample_weights == 0.25).all()


def test_a_masked_truncated_rubric_sample_has_reward_zero_and_leaves_correctness_undefined():
    groups = group_advantages(
        np.array([[0.4, 0.8]]),
        np.full((1, 2), np.nan),
        np.ones((1, 2), bool),
        gamma=1.0,
        truncated=np.array([[True, False]]),
        mask_truncated=True,
    )
    np.testing.assert_allclose(groups.advantages, [[-0.4 / (0.4 + EPS), 0.4 / (0.4 + EPS)]], rtol=1e-13)
    assert groups.weight.tolist() == [1.0]


@given(
    rewards=hnp.arrays(float, st.tuples(st.integers(1, 4), st.integers(2, 6)), elements=st.floats(-3, 3, width=16)),
    seed=st.integers(0, 99),
)
def test_advantages_sum_to_zero_follow_the_rewards_and_ignore_order(rewards, seed):
    rng = np.random.default_rng(seed)
    valid = rng.random(rewards.shape) < 0.8
    correct = (rng.random(rewards.shape) < 0.5).astype(float)
    groups = group_advantages(rewards, correct, valid, gamma=1.0)
    np.testing.assert_allclose(groups.advantages.sum(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(groups.sample_weights.sum(axis=1), groups.kept, atol=1e-12)
    assert not groups.advantages[~valid].any()
    for advantages, row, counted in zip(groups.advantages, rewards, valid, strict=True):
        order = np.argsort(row[counted], kind="stable")
        assert (np.diff(advantages[counted][order]) >= 0).all()
    order = rng.permutation(rewards.shape[1])
    shuffled = group_advantages(rewards[:, order], correct[:, order], valid[:, order], gamma=1.0)
    np.testing.assert_allclose(shuffled.advantages, groups.advantages[:, order], rtol=1e-6, atol=1e-6)


def test_bad_verdicts_are_named():
    ones, yes = np.ones((2, 3)), np.ones((2, 3), bool)
    broken = ones.copy()
    broken[1, 2] = np.nan
    with pytest.raises(UserError, match=r"rewards\[1, 2\] is nan"):
        group_advantages(broken, ones, yes, gamma=1.0)
    with pytest.raises(UserError, match=r"correct\[0, 0\] is 0\.5"):
        group_advantages(ones, ones / 2, yes, gamma=1.0)
    with pytest.raises(UserError, match="shapes are"):
        group_advantages(ones, ones[:1], yes, gamma=1.0)
    with pytest.raises(UserError, match="normalise_by is 'std'"):
        group_advantages(ones, ones, yes, gamma=1.0, normalise_by="std")
    with pytest.raises(UserError, match="mask_truncated is True"):
        group_advantages(ones, ones, yes, gamma=1.0, mask_truncated=True)
