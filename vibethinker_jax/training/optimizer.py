"""AdamW and its schedule."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import abstract_params, map_specs, parameter_shardings, parameter_specs
from vibethinker_jax.parallel.rules import Placement

MOMENT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW; the stage configs say where each number comes from.

    Attributes:
        peak: highest learning rate.
        floor: learning rate of the last step; equal to `peak` for a constant one.
        warmup_fraction: share of all steps with linear warm-up, in [0, 1).
        b1, b2, eps: Adam's.
        weight_decay: decoupled; not applied to norms and biases.
        clip_norm: largest global norm of the gradient; 0 turns clipping off.
        moment_dtype: of Adam's first moment, "float32" or "bfloat16"; the second is float32.
        offload: keep both moments in host memory between steps (training/step.py).
    """

    peak: float
    floor: float
    warmup_fraction: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    moment_dtype: str = "float32"
    offload: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.peak:
            raise UserError(f"optimizer.floor is {self.floor}; it must lie between 0 and optimizer.peak = {self.peak}")
        if not 0 <= self.warmup_fraction < 1:
            raise UserError(f"optimizer.warmup_fraction is {self.warmup_fraction}; it must lie in [0, 1)")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}; it must lie in [0, 1)")
        if self.moment_dtype not in MOMENT_DTYPES:
            raise UserError(
                f"optimizer.moment_dtype is {self.moment_dtype!r}; choose one of {', '.join(MOMENT_DTYPES)}"
            )
        for name in ("weight_decay", "clip_norm"):
            if getattr(self, name) < 0:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}; it must not be negative")


def warmup_cosine(peak: float, floor: float, warmup_fraction: float, total_steps: int) -> optax.Schedule:
    """Learning rate per step (0-based): linear warm-up, then half a cosine from peak to floor.

    VibeThinker-3B report section 2.1.2 (5e-5 to 8e-8 with 5% warm-up). The warm-up takes
    W = ceil(fraction * total) steps and ends at the peak, step t of it having peak * (t + 1) / W, so that no step
    is wasted on a rate of zero; the last step of all has the floor.
    """
    warmup = math.ceil(warmup_fraction * total_steps)
    last_warmup = max(warmup - 1, 0)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - last_warmup) / max(total_steps - 1 - last_warmup, 1), 0.0, 1.0)
        cosine = floor + 0.5 * (peak - floor) * (1 + jnp.cos(jnp.pi * progress))
        return jnp.where(step < warmup, peak * (step + 1) / max(warmup, 1), cosine)

    return schedule


def make_optimizer(
    config: OptimizerConfig, model: Qwen2Config, total_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Clipping by global norm, then AdamW; also the schedule, for logging."""
    schedule = warmup_cosine(config.peak, config.floor, config.warmup_fraction, total_steps)
    decays = map_specs(lambda spec: spec.decays, parameter_specs(model))
    adamw = optax.adamw(
        schedule,
        config.b1,
        config.b2,
        config.eps,
        weight_decay=config.weight_decay,
        mask=decays,
        mu_dtype=jnp.dtype(config.moment_dtype),
    )
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, adamw), schedule


def optimizer_shardings(
    optimizer: optax.GradientTransformation, model: Qwen2Config, placement: Placement, *, offload: bool = False
) -> Any:
    """Shardings of the optimizer state: moments lie with their parameters, counters everywhere.

    Args:
        offload: the moments lie in the pinned memory of the devices' hosts.

    Raises:
        UserError: `offload` without a mesh.
    """
    if offload and placement.mesh is None:
        raise UserError("optimizer.offload needs a mesh to say where the moments live")
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding.with_memory_kind("pinned_host") if offload else sharding,
        jax.eval_shape(optimizer.init, abstract_params(model)),
        parameter_shardings(model, placement),
        transform_non_params=lambda _: placement.replicated(),
        is_leaf=lambda node: node is None,
    )
