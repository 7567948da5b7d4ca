"""The engine's device functions, each compiled once and ahead of time for its one shape.

An executable refuses arguments of another shape, type or placement, so nothing can recompile behind the caller's
back. The planner lowers the same functions for devices that are not there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import Params, parameter_shardings
from vibethinker_jax.models.qwen2 import KVCache, build, init_cache
from vibethinker_jax.rollout.cache import EngineShape, abstract_cache, copy_prompts
from vibethinker_jax.rollout.slots import SlotTable
from vibethinker_jax.rollout.steps import Burst, SlotState, decode_burst, prefill_chunk
from vibethinker_jax.rollout.weights import SampledPolicy, cast_for_compute, needs_cast


class EngineFunctions:
    """Compiled functions for one model shape, engine shape and placement.

    Attributes:
        params: shape, dtype and placement of the weights that they take.
        slot_cache, prompt_cache: those of the caches.
        compilations: how many have been compiled so far; each is compiled when it is first needed.

    Args:
        policy: its weights may be abstract (jax.ShapeDtypeStruct) if it has a mesh and only `lower_prefill` and
            `lower_decode` are used.
    """

    def __init__(self, policy: SampledPolicy, shape: EngineShape) -> None:
        self.config, self.placement, self.shape = policy.config, policy.placement, shape
        self.compute_dtype = jnp.dtype(policy.compute_dtype)
        config, placement = self.config, self.placement
        leaf = jax.tree.leaves(policy.params)[0]
        device = next(iter(leaf.devices())) if isinstance(leaf, jax.Array) else jax.local_devices()[0]
        self.compilations = 0
        # Results that the host reads are whole on every device, so every process can read all of them.
        self.replicated = placement.replicated() or SingleDeviceSharding(device)
        self.slot_cache = abstract_cache(
            config, shape.slots, shape.length, self.compute_dtype, placement, self.replicated
        )
        self.prompt_cache = abstract_cache(
            config, shape.prefill_batch, shape.length, self.compute_dtype, placement, self.replicated, rows="batch"
        )
        given = jax.eval_shape(lambda tree: tree, policy.params)
        self.params = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(functools.partial(cast_for_compute, compute_dtype=self.compute_dtype), given),
            self._param_shardings(given),
        )
        self._casts: dict[Any, Callable[[Params], Params]] = {}

    def engine_params(self, policy: SampledPolicy) -> Params:
        """A policy's parameters where and as the engine wants them; shared, not copied, if they are so already.

        Raises:
            UserError: the policy's shape or compute dtype is not the one compiled for.
        """
        if policy.config != self.config:
            raise UserError(f"policy has shape {policy.config}; this engine was made for {self.config}")
        if jnp.dtype(policy.compute_dtype) != self.compute_dtype:
            raise UserError(
                f"policy computes in {jnp.dtype(policy.compute_dtype)}; this engine was made for {self.compute_dtype}"
            )
        shardings = self._param_shardings(policy.params)
        placed = jax.device_put(policy.params, shardings)
        if needs_cast(placed, self.compute_dtype):
            dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(placed))
            if dtypes not in self._casts:
                cast = functools.partial(cast_for_compute, compute_dtype=self.compute_dtype)
                self._casts[dtypes] = self._compile(cast, (_abstract(placed),), out_shardings=shardings)
            placed = self._casts[dtypes](placed)
        return placed

    @functools.cached_property
    def new_caches(self) -> Callable[[], tuple[KVCache, KVCache]]:
        """() -> zeros for (slots, prompts)."""

        def zeros() -> tuple[KVCache, KVCache]:
            shape, dtype = self.shape, self.compute_dtype
            return (
                init_cache(self.config, shape.slots, shape.length, dtype),
                init_cache(self.config, shape.prefill_batch, shape.length, dtype),
            )

        return self._compile(zeros, (), out_shardings=_shardings((self.slot_cache, self.prompt_cache)))

    @functools.cached_property
    def prefill(self) -> Callable[[Params, KVCache, np.ndarray, np.ndarray], KVCache]:
        """(params, prompts' cache, tokens, start) -> prompts' cache; see `prefill_chunk`."""
        return self._compile_lowered(self.lower_prefill())

    def lower_prefill(self) -> jax.stages.Lowered:
        """`prefill`, before it is compiled."""
        rows, chunk = self.shape.prefill_batch, self.shape.prefill_chunk

        def run(params: Params, cache: KVCache, tokens: jax.Array, start: jax.Array) -> KVCache:
            return prefill_chunk(build(self.config, params, self.placement, self.compute_dtype), cache, tokens, start)

        host = (np.zeros((rows, chunk), np.int32), np.zeros((), np.int32))
        program = jax.jit(run, donate_argnums=1, out_shardings=_shardings(self.prompt_cache))
        return program.lower(self.params, self.prompt_cache, *self._host(host))

    @functools.cached_property
    def admit(self) -> Callable[[KVCache, KVCache, np.ndarray, np.ndarray], KVCache]:
        """(slots' cache, prompts' cache, source, length) -> slots' cache; see `copy_prompts`."""
        per_slot = np.zeros(self.shape.slots, np.int32)
        return self._compile(
            copy_prompts,
            (self.slot_cache, self.prompt_cache, *self._host((per_slot, per_slot))),
            donate_argnums=0,
            out_shardings=_shardings(self.slot_cache),
        )

    @functools.cached_property
    def decode(self) -> Callable[[Params, KVCache, SlotState, np.ndarray], tuple[KVCache, Burst]]:
        """(params, slots' cache, slots, min_active) -> (slots' cache, tokens); see `decode_burst`."""
        return self._compile_lowered(self.lower_decode())

    def lower_decode(self) -> jax.stages.Lowered:
        """`decode`, before it is compiled."""

        def run(params: Params, cache: KVCache, slots: SlotState, min_active: jax.Array) -> tuple[KVCache, Burst]:
            model = build(self.config, params, self.placement, self.compute_dtype)
            return decode_burst(model, cache, slots, min_active, burst=self.shape.decode_burst)

        host = (SlotTable(self.shape.slots).state, np.zeros((), np.int32))
        burst = Burst(self.replicated, self.replicated, self.replicated)
        program = jax.jit(run, donate_argnums=1, out_shardings=(_shardings(self.slot_cache), burst))
        return program.lower(self.params, self.slot_cache, *self._host(host))

    def _param_shardings(self, params: Params) -> Params:
        if self.placement.mesh is None:
            return jax.tree.map(lambda _: self.replicated, params)
        return parameter_shardings(self.config, self.placement)

    def _host(self, arrays: Any) -> Any:
        """Small host arrays, given whole to every device."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.replicated), arrays
        )

    def _compile(self, function: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Callable[..., Any]:
        return self._compile_lowered(jax.jit(function, **options).lower(*args))

    def _compile_lowered(self, lowered: jax.stages.Lowered) -> Callable[..., Any]:
        self.compilations += 1
        return lowered.compile()


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)
