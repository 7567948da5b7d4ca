"""Long2Short by hand: who is shifted, by how much, and what divides the result."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives import group_advantages, length_shift, long2short_advantages

EPS = 1e-6


def test_shift_of_three_correct_responses_by_hand():
    # 1/L = 1/2, 1/4, 1/4: mean 1/3, deviations 1/6, -1/12, -1/12, largest 1/6: 0.2 * (1, -1/2, -1/2)
    shift = length_shift(np.array([[2, 4, 99, 4]]), np.array([[True, True, False, True]]))
    np.testing.assert_allclose(shift, [[0.2, -0.1, 0.0, -0.1]], atol=1e-15)


@pytest.mark.parametrize("length", [5, 11, 41, 65536])
def test_equal_lengths_shift_exactly_nothing(length):
    # 1/5 + 1/5 + 1/5 over 3 is not 1/5 in float64: the deviations are not 0, and must not be scaled up to lambda
    assert not length_shift(np.full((1, 3), length), np.ones((1, 3), bool)).any()


def test_fewer_than_two_correct_responses_shift_nothing():
    lengths = np.array([[5, 10, 20], [5, 10, 20]])
    assert not length_shift(lengths, np.array([[False, True, False], [False, False, False]])).any()


@given(
    lengths=st.lists(st.integers(1, 65536), min_size=2, max_size=8),
    correct=st.integers(0, 255),
    lam=st.floats(0.01, 1),
)
def test_shifts_sum_to_zero_reach_lambda_and_prefer_the_shorter(lengths, correct, lam):
    members = np.array([[bool(correct >> i & 1) for i in range(len(lengths))]])
    lengths = np.array([lengths])
    shift = length_shift(lengths, members, lam=lam)
    assert not shift[~members].any()
    assert abs(shift.sum()) < 1e-9
    chosen = lengths[members]
    if len(set(chosen.tolist())) > 1:
        assert np.abs(shift).max() == pytest.approx(lam)
        assert (np.diff(shift[members][np.argsort(chosen)]) <= 1e-12).all()
    else:
        assert not shift.any()


def advantages(rows, lengths, **options):
    rewards = np.array(rows, float)
    valid = np.ones(rewards.shape, bool)
    return long2short_advantages(rewards, rewards, valid, np.array(lengths), **({"gamma": 1.0} | options))


def test_an_all_correct_group_under_the_three_normalisations():
    # Shifts +0.2, -0.2 around equal rewards. p = 1, so w = 1/2 whatever the shaped rewards are.
    rows, lengths = [[1, 1]], [[10, 30]]
    shaped = advantages(rows, lengths)
    np.testing.assert_allclose(shaped.advantages, [[0.5 * 0.2 / (0.2 + EPS), -0.5 * 0.2 / (0.2 + EPS)]], rtol=1e-9)
    for undivided in ("binary_std", "none"):
        np.testing.assert_allclose(
            advantages(rows, lengths, normalise_by=undivided).advantages, [[0.1, -0.1]], rtol=1e-9
        )
    assert shaped.accuracy.tolist() == [1.0]
    assert shaped.metrics.summary()["groups/without_signal"] == 0.0
    assert shaped.metrics.summary()["groups/all_correct"] == 1.0
    plain = group_advantages(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2), bool), gamma=1.0)
    assert not plain.advantages.any()
    assert plain.metrics.summary()["groups/without_signal"] == 1.0


def test_lambda_cancels_in_an_all_correct_group_under_shaped_std():
    small, large = (advantages([[1, 1, 1]], [[10, 20, 90]], lam=lam).advantages for lam in (0.02, 0.2))
    np.testing.assert_allclose(small, large, rtol=1e-3)


def test_a_mixed_group_under_the_three_normalisations():
    # r = (1, 1, 0, 0), r' = (1.2, 0.8, 0, 0): mean 1/2; std of r 1/2; of r': sqrt((0.49 + 0.09 + 0.25 + 0.25)/4)
    rows, lengths = [[1, 1, 0, 0]], [[10, 30, 5, 7]]
    centred = np.array([[0.7, 0.3, -0.5, -0.5]])
    for normalise_by, std in (("shaped_std", np.sqrt(0.27) + EPS), ("binary_std", 0.5 + EPS), ("none", 1.0)):
        got = advantages(rows, lengths, normalise_by=normalise_by)
        np.testing.assert_allclose(got.advantages, centred / std, rtol=1e-9)
        assert got.weight.tolist() == [1.0]


def test_all_wrong_groups_stay_without_signal():
    for normalise_by in ("shaped_std", "binary_std", "none"):
        groups = advantages([[0, 0, 0]], [[10, 30, 5]], normalise_by=normalise_by)
        assert not groups.advantages.any()
        assert groups.metrics.summary()["groups/without_signal"] == 1.0


def test_a_reward_without_correctness_is_not_shifted():
    # An incorrect response with a reward of 0.1 for its form: r' = (0.1, 1.2, 0.8), mean 0.7; p = 2/3
    rewards, correct = np.array([[0.1, 1.0, 1.0]]), np.array([[0.0, 1.0, 1.0]])
    groups = long2short_advantages(
        rewards, correct, np.ones((1, 3), bool), np.array([[1, 10, 30]]), gamma=0.0, normalise_by="none"
    )
    np.testing.assert_allclose(groups.advantages, [[-0.6, 0.5, 0.1]], rtol=1e-12)
    assert groups.accuracy[0] == 2 / 3


def test_masked_truncated_and_unjudged_samples_are_not_among_the_correct():
    rewards = np.array([[1.0, 1.0, 1.0, 1.0]])
    groups = long2short_advantages(
        rewards,
        rewards,
        np.array([[True, True, True, False]]),
        np.array([[10, 30, 1, 1]]),
        gamma=0.0,
        normalise_by="none",
        truncated=np.array([[False, False, True, False]]),
        mask_truncated=True,
    )
    # r' = (1.2, 0.8, 0): mean 2/3
    np.testing.assert_allclose(groups.advantages, [[1.2 - 2 / 3, 0.8 - 2 / 3, -2 / 3, 0.0]], rtol=1e-9)
    np.testing.assert_allclose(groups.sample_weights, [[1 / 3, 1 / 3, 0, 0]], rtol=1e-15)


def test_bad_lengths_are_named():
    with pytest.raises(UserError, match=r"lengths\[0, 1\] is 0"):
        length_shift(np.array([[3, 0]]), np.ones((1, 2), bool))
    with pytest.raises(UserError, match=r"lam is -0\.2"):
        length_shift(np.array([[3, 4]]), np.ones((1, 2), bool), lam=-0.2)
