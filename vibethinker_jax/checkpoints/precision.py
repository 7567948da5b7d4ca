"""Conversions between the three floating-point formats of checkpoints, with nothing lost unnoticed."""

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from vibethinker_jax.errors import UserError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
_BITS = {2: np.uint16, 4: np.uint32}


def checkpoint_dtype(dtype: DTypeLike) -> np.dtype:
    """The numpy dtype of a name such as "bfloat16". Raises UserError unless it is bfloat16, float16 or float32."""
    names = {str(known): known for known in (BFLOAT16, FLOAT16, FLOAT32)}
    name = dtype if isinstance(dtype, str) else str(np.dtype(dtype))
    if name not in names:
        raise UserError(f"dtype is {name!r}; choose one of {', '.join(names)}")
    return names[name]


def convert(values: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """Converts, rounding to the nearest (ties to even); the same array where nothing changes.

    Raises:
        UserError: a finite value is too large for `dtype`. `what` names the tensor in the message.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(dtype)
    if dtype != FLOAT32 and not np.array_equal(np.isfinite(converted), np.isfinite(values)):
        largest = np.abs(values[np.isfinite(values)].astype(FLOAT32)).max()
        raise UserError(
            f"{what}: holds {largest:g}, too large for {dtype} (at most {ml_dtypes.finfo(dtype).max}); "
            "convert to bfloat16 or float32 instead"
        )
    return converted


def convert_exactly(values: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """Converts where every bit can be had back by the opposite conversion.

    Raises:
        UserError: one cannot: a value is not representable, or a NaN carries a payload. `what` names the tensor.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(dtype)
        back = converted.astype(values.dtype)
    if not np.array_equal(bits(back), bits(values)):
        raise UserError(f"{what}: has values that {dtype} cannot hold exactly; convert with an explicit dtype")
    return converted


def bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns as unsigned integers, flattened: bfloat16 and float16 as uint16, float32 as uint32."""
    return np.ascontiguousarray(values).reshape(-1).view(_BITS[values.dtype.itemsize])
