"""Conversions against torch's, and what they refuse."""

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from vibethinker_jax.checkpoints.precision import BFLOAT16, FLOAT16, FLOAT32, bits, checkpoint_dtype, convert
from vibethinker_jax.checkpoints.precision import convert_exactly as exactly
from vibethinker_jax.errors import UserError

torch = pytest.importorskip("torch", reason="the oracle; it is in the test extra on Python 3.11")

TORCH = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16, FLOAT32: torch.float32}


def to_torch(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(TORCH[values.dtype])


def torch_bits(tensor: torch.Tensor) -> np.ndarray:
    integer = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.view(integer).numpy().view(np.uint32 if tensor.dtype == torch.float32 else np.uint16)


@hypothesis.given(
    st.lists(st.floats(-65000, 65000, width=32), min_size=1, max_size=40),
    st.sampled_from(list(TORCH)),
    st.sampled_from(list(TORCH)),
)
def test_conversion_rounds_as_torch_does(numbers: list[float], before: np.dtype, after: np.dtype) -> None:
    values = np.array(numbers, np.float32).astype(before)
    hypothesis.assume(np.abs(values.astype(np.float32)).max() <= 65504)
    np.testing.assert_array_equal(bits(convert(values, after, "x")), torch_bits(to_torch(values).to(TORCH[after])))


def test_ties_go_to_the_even_neighbour() -> None:
    # bfloat16 keeps 8 significant bits: between 1 and 1 + 2**-7 lies the tie 1 + 2**-8; 1 is even. Likewise
    # 1 + 3 * 2**-8 lies between 1 + 2**-7 (odd) and 1 + 2**-6 (even).
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    expected = np.array([1, 1 + 2**-6, 1 + 2**-7], np.float32)
    np.testing.assert_array_equal(convert(values, BFLOAT16, "x").astype(np.float32), expected)


def test_a_value_that_overflows_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="layer 3 weight: holds 70000, too large for float16"):
        convert(np.array([[1.0, -70000.0]], np.float32), FLOAT16, "layer 3 weight")


def test_infinities_and_nans_of_the_source_are_kept() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    np.testing.assert_array_equal(convert(values, FLOAT16, "x"), values.astype(np.float16))


def test_exact_conversion_refuses_what_would_be_lost() -> None:
    exactly(np.array([0.5, -0.0, np.inf], np.float32), FLOAT16, "x")
    with pytest.raises(UserError, match="w: has values that bfloat16 cannot hold exactly"):
        exactly(np.array([1 + 2**-9], np.float32), BFLOAT16, "w")
    with pytest.raises(UserError, match="cannot hold exactly"):  # -0.0 and 0.0 are equal but not the same bits
        exactly(np.array([0x7FC1], np.uint16).view(ml_dtypes.bfloat16), FLOAT32, "a NaN with a payload")


def test_other_dtypes_are_refused() -> None:
    assert checkpoint_dtype("bfloat16") == checkpoint_dtype(ml_dtypes.bfloat16) == BFLOAT16
    with pytest.raises(UserError, match="'int8'; choose one of bfloat16, float16, float32"):
        checkpoint_dtype("int8")
    with pytest.raises(UserError, match="'float64'"):
        checkpoint_dtype(np.float64)
