"""Statistics against numbers worked out by hand and against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibethinker_jax.evaluation.protocol import (
    average_at_n,
    bootstrap_interval,
    paired_difference,
    pass_at_k,
    problem_means,
)

NAN = math.nan


def test_avg_at_n_is_the_mean_of_problem_means():
    # means 1/2, 1, 0: average 1/2; deviations 0, 1/2, -1/2: variance (1/4 + 1/4) / 2 = 1/4, standard error 1/2 / sqrt 3
    estimate = average_at_n([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert estimate.value == 0.5
    assert estimate.standard_error == pytest.approx(0.5 / math.sqrt(3))
    assert (estimate.problems, estimate.samples, estimate.missing) == (3, 12, 0)
    assert (estimate.low, estimate.high) == (0.0, 1.0)  # all-zero and all-one draws have probability 1/27 each


def test_a_sample_without_a_verdict_leaves_numerator_and_denominator():
    # problem means 1/1 and 1/3, not 1/2 and 1/3; averaged over problems, so not 2/4
    estimate = average_at_n([[1, NAN, NAN], [1, 0, 0]])
    assert estimate.value == pytest.approx((1 + 1 / 3) / 2)
    assert (estimate.problems, estimate.samples, estimate.missing) == (2, 4, 2)


def test_a_problem_without_any_verdict_counts_nowhere():
    estimate = average_at_n([[NAN, NAN], [1, 0], [1, 1]])
    assert estimate.value == 0.75
    assert (estimate.problems, estimate.samples, estimate.missing) == (2, 4, 2)
    assert problem_means([[NAN, NAN], [1, 0]])[1] == 0.5
    assert math.isnan(problem_means([[NAN, NAN], [1, 0]])[0])


def test_one_problem_has_no_interval():
    estimate = average_at_n([[1, 0, 0, 0]])
    assert estimate.value == 0.25
    assert math.isnan(estimate.standard_error)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_one_sample_per_problem_works():
    estimate = average_at_n([[1], [0], [1], [1]])
    # variance of 1, 0, 1, 1 about 3/4: (3/16 + 9/16) / 3 = 1/4
    assert estimate.value == 0.75
    assert estimate.standard_error == pytest.approx(0.5 / 2)


def test_no_verdict_at_all_gives_no_figure():
    estimate = average_at_n([[NAN], [NAN]])
    assert math.isnan(estimate.value)
    assert (estimate.problems, estimate.samples, estimate.missing) == (0, 0, 2)


def test_the_interval_is_seeded_and_covers_what_theory_says():
    means = np.linspace(0, 1, 30)
    first = bootstrap_interval(means, seed=3)
    assert first == bootstrap_interval(means, seed=3)
    assert first != bootstrap_interval(means, seed=4)
    # normal approximation: 1/2 -+ 1.96 * population std / sqrt 30
    half = 1.96 * means.std() / math.sqrt(30)
    assert first == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)


def test_the_interval_is_over_problems_and_not_over_the_pool_of_samples():
    # 10 problems that are always right and 10 that never are: the samples within a problem carry no news
    few = average_at_n([[1] * 2] * 10 + [[0] * 2] * 10)
    many = average_at_n([[1] * 64] * 10 + [[0] * 64] * 10)
    assert (few.low, few.high, few.standard_error) == (many.low, many.high, many.standard_error)
    assert many.high - many.low > 0.3


def test_pass_at_k_by_hand():
    # n 4, c 2, k 2: 1 - C(2,2)/C(4,2) = 5/6. c 1: 1 - C(3,2)/6 = 1/2. c 0: 0. Mean 4/9.
    correct = [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    value, problems = pass_at_k(correct, 2)
    assert value == pytest.approx(4 / 9)
    assert problems == 3
    assert pass_at_k(correct, 1)[0] == pytest.approx(np.mean(correct))
    assert pass_at_k(correct, 4)[0] == pytest.approx(2 / 3)  # any right at all


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(row, k):
    subsets = list(itertools.combinations(row, k))
    value, problems = pass_at_k([row], k)
    if not subsets:
        assert math.isnan(value)
        assert problems == 0
    else:
        assert value == pytest.approx(np.mean([any(subset) for subset in subsets]))


def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels():
    row = np.zeros(100_000)
    row[:3] = 1
    # with 3 right of n, k = 1: 3/n, which 1 - C/C would lose to cancellation
    assert pass_at_k([row], 1)[0] == pytest.approx(3e-5, rel=1e-9)
    assert pass_at_k([row], 50_000)[0] == pytest.approx(0.875, abs=1e-4)  # about 1 - 1/2**3


def test_pass_at_k_leaves_out_problems_with_too_few_verdicts():
    assert pass_at_k([[1, NAN], [0, 1]], 2) == (1.0, 1)
    value, problems = pass_at_k([[1, NAN], [0, NAN]], 2)
    assert math.isnan(value)
    assert problems == 0
    with pytest.raises(ValueError, match="k is 0"):
        pass_at_k([[1]], 0)


def test_the_paired_difference_drops_the_spread_between_problems():
    # every problem gains exactly 1/4: unpaired intervals overlap widely, the paired one is a point
    first = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    second = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])
    difference = paired_difference(first, second)
    assert difference.value == 0.25
    assert (difference.low, difference.high) == (0.25, 0.25)
    assert average_at_n(second).low < average_at_n(first).high
    assert paired_difference(second, first).value == -0.25


def test_a_paired_difference_takes_unequal_numbers_of_samples_and_gaps():
    # means 1/2 -> 1 and 0 -> 0; the third problem has no verdict in the second run
    difference = paired_difference([[1, 0], [0, NAN], [1, 1]], [[1, 1, 1], [0, 0, NAN], [NAN, NAN, NAN]])
    assert difference.value == 0.25
    assert (difference.problems, difference.samples, difference.missing) == (2, 10, 5)
    with pytest.raises(ValueError, match="3 rows against 2"):
        paired_difference([[1], [1], [1]], [[1], [1]])


@pytest.mark.parametrize("scores", [[], [[]], [1, 0]])
def test_an_empty_table_is_refused(scores):
    with pytest.raises(ValueError, match="shape"):
        average_at_n(scores)
