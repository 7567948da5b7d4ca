"""The one entry to attention over packed rows: any backend, on one device or with rows, heads and sequence sharded."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from vibethinker_jax.attention import gather, ring
from vibethinker_jax.attention.backends import BACKENDS, Backend, choose_backend, get_backend, resolve_blocks
from vibethinker_jax.attention.block_map import Blocks
from vibethinker_jax.attention.cost import STRATEGIES, choose_strategy
from vibethinker_jax.attention.visibility import key_codes, query_bounds
from vibethinker_jax.errors import UserError
from vibethinker_jax.parallel.rules import RULES, UNPLACED, Placement

# What a rematerialisation policy must save for the backward pass not to run the forward kernel again.
OUT_NAME, LOG_SUM_EXP_NAME = "attention_out", "attention_log_sum_exp"


@dataclass(frozen=True)
class AttentionConfig:
    """How attention is computed; every choice computes the same.

    backend: "auto", or one of `backends.BACKENDS`.
    strategy: what a sharded sequence does with its K/V: "gather", "ring", or "auto" (see `cost`).
    block_q, block_kv: block sizes in tokens; 0 for the backend's default.
    """

    backend: str = "auto"
    strategy: str = "auto"
    block_q: int = 0
    block_kv: int = 0

    def __post_init__(self) -> None:
        for field, value, choices in (("backend", self.backend, BACKENDS), ("strategy", self.strategy, STRATEGIES)):
            if value not in ("auto", *choices):
                raise UserError(f"attention {field} is {value!r}; choose one of auto, {', '.join(choices)}")
        for field, value in (("block_q", self.block_q), ("block_kv", self.block_kv)):
            if value < 0:
                raise UserError(f"attention {field} is {value}; use a number of tokens, or 0 for the default")


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    segment_ids: Int[Array, "batch seq"],
    positions: Int[Array, "batch seq"],
    *,
    placement: Placement = UNPLACED,
    config: AttentionConfig = AttentionConfig(),
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention inside each document of a packed row; padding (segment id 0) returns zero.

    The tokens of a row may come in any order: `segment_ids` and `positions` say who sees whom. Softmax statistics are
    float32. The derivative is written by hand (reverse mode, once); its residuals are the arguments, the result and the
    log-sum-exp, the last two under OUT_NAME and LOG_SUM_EXP_NAME.

    Args:
        q, k, v: one dtype, float32 or bfloat16, which is also the result's. Query head h reads KV head
            h // (heads / kv_heads).
        segment_ids: 1, 2, ... per document of a row, 0 for padding. The largest times `seq` must stay below 2**31.
        positions: position of each token inside its document, below `seq`.
        placement: where the arrays live. Dimensions that the mesh does not divide are computed whole on every device.
        config: how to compute.

    Raises:
        UserError: `kv_heads` does not divide `heads`.
    """
    if q.shape[2] % k.shape[2]:
        raise UserError(
            f"attention has {q.shape[2]} query heads for {k.shape[2]} KV heads; grouped-query attention needs a "
            "multiple"
        )
    return _attend(_plan(q, k, placement, config), q, k, v, segment_ids, positions)


@dataclass(frozen=True)
class _Plan:
    """Everything static about a call. Equal plans compare equal, so that a second call compiles nothing.

    query_spec, key_spec, token_spec: of q, k and segment_ids.
    kv_heads_per_shard: of what the backend gets; fewer than a device holds where `tensor` does not divide them.
    length: of a whole row.
    """

    placement: Placement
    query_spec: PartitionSpec
    key_spec: PartitionSpec
    token_spec: PartitionSpec
    backend: str
    platform: str
    strategy: str
    blocks: Blocks
    kv_heads_per_shard: int
    length: int

    @property
    def statistics_spec(self) -> PartitionSpec:
        """Of log_sum_exp [batch, heads, seq]."""
        batch, sequence, heads, _ = self.query_spec
        return PartitionSpec(batch, heads, sequence)

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several shards of query heads read the same KV head, which all of them hold."""
        return self.query_spec[2] is not None and self.key_spec[2] is None

    def sharded(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` of global arrays as one of each device's part."""
        if self.placement.mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def distributed_backend(self) -> Backend:
        backend = get_backend(self.backend, self.platform)
        if self.query_spec[1] is None:
            return backend
        (axis,) = RULES["sequence"]
        return {"gather": gather, "ring": ring}[self.strategy].over_context(backend, axis, self.placement.size(axis))


def _plan(q: jax.Array, k: jax.Array, placement: Placement, config: AttentionConfig) -> _Plan:
    batch, length, _, head_dim = q.shape
    kv_heads = k.shape[2]
    query_spec = placement.spec(("batch", "sequence", "heads", None), q.shape, strict=False)
    batch_axes, sequence_axes, head_axes, _ = query_spec
    tensor = placement.size(*RULES["heads"]) if head_axes is not None else 1
    if kv_heads % tensor == 0:
        key_spec, kv_heads_per_shard = PartitionSpec(batch_axes, sequence_axes, head_axes, None), kv_heads // tensor
    else:
        key_spec, kv_heads_per_shard = PartitionSpec(batch_axes, sequence_axes, None, None), 1
        if tensor % kv_heads:
            # The query heads of one shard would read parts of several groups: compute all heads on every shard.
            query_spec, tensor = key_spec, 1
            kv_heads_per_shard = kv_heads
    context = placement.size(*RULES["sequence"]) if sequence_axes is not None else 1
    rows = batch // (placement.size(*RULES["batch"]) if batch_axes is not None else 1)
    # A program compiled for TPUs from a host without them runs where its mesh is.
    mesh = placement.mesh
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    strategy = config.strategy
    if strategy == "auto":
        strategy = choose_strategy(rows, length, kv_heads_per_shard, head_dim, k.dtype.itemsize)
    backend = choose_backend(config.backend, platform, length, head_dim, sharded=context > 1)
    local = length // context
    return _Plan(
        placement=placement,
        query_spec=query_spec,
        key_spec=key_spec,
        token_spec=PartitionSpec(batch_axes, sequence_axes),
        backend=backend,
        platform=platform,
        strategy=strategy,
        blocks=resolve_blocks(
            config.block_q,
            config.block_kv,
            get_backend(backend, platform).default_blocks,
            queries=local,
            keys=local if strategy == "ring" else length,
        ),
        kv_heads_per_shard=kv_heads_per_shard,
        length=length,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array
) -> jax.Array:
    return _attend_forward(plan, q, k, v, segment_ids, positions)[0]


def _attend_forward(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def local(q, k, v, segment_ids, positions):
        k, v = _own_kv_heads(plan, k), _own_kv_heads(plan, v)
        queries = query_bounds(segment_ids, positions, plan.length)
        keys = key_codes(segment_ids, positions, plan.length)
        out, log_sum_exp = plan.distributed_backend().forward(
            _heads_first(q), _heads_first(k), _heads_first(v), queries, keys, blocks=plan.blocks
        )
        return _heads_first(out).astype(q.dtype), log_sum_exp

    in_specs = (plan.query_spec, plan.key_spec, plan.key_spec, plan.token_spec, plan.token_spec)
    run = plan.sharded(local, in_specs, (plan.query_spec, plan.statistics_spec))
    out, log_sum_exp = run(q, k, v, segment_ids, positions)
    out, log_sum_exp = checkpoint_name(out, OUT_NAME), checkpoint_name(log_sum_exp, LOG_SUM_EXP_NAME)
    return out, (q, k, v, segment_ids, positions, out, log_sum_exp)


def _attend_backward(
    plan: _Plan, residuals: tuple[jax.Array, ...], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    def local(q, k, v, segment_ids, positions, out, log_sum_exp, d_out):
        queries = query_bounds(segment_ids, positions, plan.length)
        keys = key_codes(segment_ids, positions, plan.length)
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        dq, dk, dv = plan.distributed_backend().backward(
            *(_heads_first(x) for x in (q, _own_kv_heads(plan, k), _own_kv_heads(plan, v))),
            queries,
            keys,
            _heads_first(d_out.astype(q.dtype)),
            log_sum_exp,
            delta.swapaxes(1, 2),
            blocks=plan.blocks,
        )
        dk, dv = (_sum_kv_heads(plan, _heads_first(d), x) for d, x in ((dk, k), (dv, v)))
        return _heads_first(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    keys_and_values = (plan.key_spec, plan.key_spec)
    in_specs = (plan.query_spec, *keys_and_values, plan.token_spec, plan.token_spec)
    in_specs += (plan.query_spec, plan.statistics_spec, plan.query_spec)
    run = plan.sharded(local, in_specs, (plan.query_spec, *keys_and_values))
    # Together with d_out, so that nothing is gathered before the layers behind have been differentiated: otherwise the
    # K/V of whole rows lie in memory beside the largest activations of the step.
    q, k, v, *rest = residuals
    q, k, v, d_out = lax.optimization_barrier((q, k, v, d_out))
    return *run(q, k, v, *rest, d_out), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _heads_first(array: Float[Array, "batch first second head_dim"]) -> Float[Array, "batch second first head_dim"]:
    """From sequence-major to head-major and back."""
    return array.swapaxes(1, 2)


def _own_kv_heads(plan: _Plan, array: Float[Array, "batch seq kv_heads head_dim"]) -> jax.Array:
    """The KV heads that this shard's query heads read."""
    if not plan.shares_kv_heads:
        return array
    return lax.dynamic_slice_in_dim(array, _first_kv_head(plan, array.shape[2]), plan.kv_heads_per_shard, axis=2)


def _sum_kv_heads(
    plan: _Plan, gradient: Float[Array, "batch seq own_kv_heads head_dim"], like: jax.Array
) -> Float[Array, "batch seq kv_heads head_dim"]:
    """The gradients of all KV heads from each shard's part, where shards of query heads share them."""
    if not plan.shares_kv_heads:
        return gradient
    everything = jnp.zeros(like.shape, gradient.dtype)
    first = _first_kv_head(plan, like.shape[2])
    return lax.psum(lax.dynamic_update_slice_in_dim(everything, gradient, first, axis=2), RULES["heads"])


def _first_kv_head(plan: _Plan, kv_heads: int) -> jax.Array:
    """Of this shard: its place among the shards, scaled to the KV heads."""
    return lax.axis_index(RULES["heads"]) * kv_heads // plan.placement.size(*RULES["heads"])
