"""From a policy's parameters to the engine's: same placement, in the dtype of the computation."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.rollout.prompts import TextCodec


class SampledPolicy(Protocol):
    """What the engine reads of a policy (models/policy.py)."""

    config: Qwen2Config
    params: Params
    tokenizer: TextCodec
    placement: Placement
    compute_dtype: Any


def cast_for_compute(params: Params, compute_dtype: Any) -> Params:
    """Parameters rounded once as the model would round them at every use, so that no bit of a result changes.

    Biases and norm scales stay as they are: the model uses them in float32.
    """

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf if path[-1].key in ("bias", "scale") else leaf.astype(compute_dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def needs_cast(params: Params, compute_dtype: Any) -> bool:
    """Whether `cast_for_compute` would change anything."""
    after = jax.eval_shape(lambda tree: cast_for_compute(tree, compute_dtype), params)
    return any(
        jnp.dtype(old.dtype) != new.dtype
        for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True)
    )
