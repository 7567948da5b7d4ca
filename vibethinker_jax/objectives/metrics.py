"""A container for what an objective observes, in a form that adds up over micro-batches, hosts and steps."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Scalar = Float[Array | np.ndarray, ""] | float


@partial(jax.tree_util.register_dataclass, data_fields=["means", "shares", "maxima"], meta_fields=[])
@dataclass(frozen=True)
class Metrics:
    """Unreduced observations by name; a pytree of scalars, so it passes through jit and scan.

    Attributes:
        means: name -> (sum, count), reported as sum / count.
        shares: name -> (sum, sum of squares, count) of positive weights, reported as the effective sample size over the
            sample size, sum^2 / (count * sum of squares): 1 when all weights are equal, 1/count when one dominates.
        maxima: name -> largest value, -inf when nothing was observed.
    """

    means: dict[str, tuple[Scalar, Scalar]] = field(default_factory=dict)
    shares: dict[str, tuple[Scalar, Scalar, Scalar]] = field(default_factory=dict)
    maxima: dict[str, Scalar] = field(default_factory=dict)

    def add(self, other: "Metrics") -> "Metrics":
        """Observations of both; a name that only one of them has is kept as it is."""
        return Metrics(
            means=_merge(partial(jax.tree.map, operator.add), self.means, other.means),
            shares=_merge(partial(jax.tree.map, operator.add), self.shares, other.shares),
            maxima=_merge(jnp.maximum, self.maxima, other.maxima),
        )

    def summary(self) -> dict[str, float]:
        """Name -> reported value as a Python float (on the host); NaN where nothing was observed."""
        return (
            {name: _divide(total, count) for name, (total, count) in self.means.items()}
            | {
                name: _divide(float(total) ** 2, float(count) * squares)
                for name, (total, squares, count) in self.shares.items()
            }
            | {name: float(value) if np.isfinite(value) else float("nan") for name, value in self.maxima.items()}
        )


def _merge(combine: Callable[[Any, Any], Any], left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    common = {name: combine(left[name], right[name]) for name in left.keys() & right.keys()}
    return {name: common.get(name, value) for name, value in (left | right).items()}


def _divide(total: Scalar, count: Scalar) -> float:
    return float(total) / float(count) if float(count) != 0 else float("nan")
