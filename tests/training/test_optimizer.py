import numpy as np
import pytest

from vibethinker_jax.errors import UserError
from vibethinker_jax.training.optimizer import OptimizerConfig, warmup_cosine

VALID = {
    "peak": 1e-3,
    "floor": 1e-4,
    "warmup_fraction": 0.1,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}


def test_the_schedule_of_the_report():
    # R3 section 2.1.2: peak 5e-5, floor 8e-8, 5% warm-up; 100 steps: warm-up of 5, then 95 steps of cosine.
    schedule = warmup_cosine(5e-5, 8e-8, 0.05, 100)
    np.testing.assert_allclose([schedule(t) for t in range(5)], [1e-5, 2e-5, 3e-5, 4e-5, 5e-5], rtol=1e-6)
    # progress (t - 4) / 95: at t = 99 it is 1, at t = 51.5 it is 1/2.
    np.testing.assert_allclose(schedule(99), 8e-8, rtol=1e-4)
    np.testing.assert_allclose((schedule(51) + schedule(52)) / 2, (5e-5 + 8e-8) / 2, rtol=1e-4)
    rates = [float(schedule(t)) for t in range(4, 100)]
    assert rates == sorted(rates, reverse=True)
    np.testing.assert_allclose(schedule(500), 8e-8, rtol=1e-4)


@pytest.mark.parametrize(("total", "expected"), [(1, [2.0]), (2, [2.0, 1.0])])
def test_short_runs_without_warm_up_start_at_the_peak(total, expected):
    schedule = warmup_cosine(2.0, 1.0, 0.0, total)
    np.testing.assert_allclose([schedule(t) for t in range(total)], expected, rtol=1e-6)


def test_equal_peak_and_floor_are_constant():
    schedule = warmup_cosine(1e-6, 1e-6, 0.0, 50)
    np.testing.assert_allclose([schedule(t) for t in range(60)], 1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("floor", 1.0), ("warmup_fraction", 1.0), ("b1", -0.1), ("b2", 1.0), ("weight_decay", -1), ("clip_norm", -1)],
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(UserError, match=f"optimizer.{field} is {value}"):
        OptimizerConfig(**{**VALID, field: value})
