"""Training steps made bad on purpose, for tools/check_step_hlo.py: what each of its checks must notice."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step made bad on purpose.

    Attributes:
        fails: the checks that must fail; others may.
        overrides: fields of the configuration.
        patch: what to replace while the step is traced.
    """

    fails: tuple[str, ...]
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    patch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def sum_everywhere() -> contextlib.AbstractContextManager[Any]:
    """dK/dV summed whole on every device, as the derivative of a gather comes out."""
    from jax import lax

    from vibethinker_jax.attention import gather

    def reduce_scatter(x, axis_name, size, *, axis):
        total = lax.optimization_barrier(lax.psum(x, axis_name))
        own = x.shape[axis] // size
        return lax.dynamic_slice_in_dim(total, lax.axis_index(axis_name) * own, own, axis)

    return mock.patch.object(gather, "reduce_scatter", reduce_scatter)


def change_kv(change: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Attention of `change(k or v, q, placement)`."""
    from vibethinker_jax.models import qwen2

    attend = qwen2.attend

    def changed(q, k, v, *rest, placement, config):
        return attend(q, change(k, q, placement), change(v, q, placement), *rest, placement=placement, config=config)

    return mock.patch.object(qwen2, "attend", changed)


def repeat_heads() -> contextlib.AbstractContextManager[Any]:
    import jax.numpy as jnp

    return change_kv(lambda x, q, placement: jnp.repeat(x, q.shape[2] // x.shape[2], axis=2))


def keep_rows() -> contextlib.AbstractContextManager[Any]:
    """K/V gathered before attention and saved for the backward pass."""
    from jax.ad_checkpoint import checkpoint_name

    from vibethinker_jax.attention.attend import OUT_NAME

    def keep(x, q, placement):
        # Whole before and after it is saved: otherwise the compiler saves every device's own tokens.
        def whole(x):
            return placement.constrain(x, "batch", None, "kv_heads", None)

        return whole(checkpoint_name(whole(x), OUT_NAME))

    return change_kv(keep)


def gather_table() -> contextlib.AbstractContextManager[Any]:
    import jax.numpy as jnp

    from vibethinker_jax.models import qwen2

    def embed(table, tokens, placement, dtype):
        whole = placement.constrain(table.astype(dtype), None, None)
        return placement.constrain(jnp.take(whole, tokens, axis=0), "batch", "sequence", None)

    return mock.patch.object(qwen2, "embed", embed)


@contextlib.contextmanager
def wait_for_hops() -> Iterator[None]:
    """Kernels of a ring that start when the hop's transfers have arrived."""
    import jax

    from vibethinker_jax.attention import ring

    over_context, pass_on = ring.over_context, ring._pass_on
    arrived: list[jax.Array] = []

    def recorded(tree, axis, shards):
        result = pass_on(tree, axis, shards)
        arrived.extend(jax.tree.leaves(result))
        return result

    def waiting(function):
        def kernel(q, *rest, **settings):
            # Not a number that the compiler could leave out, unlike a barrier.
            zero = sum(x.ravel()[0].astype(q.dtype) * 0 for x in arrived)
            arrived.clear()
            return function(q + zero, *rest, **settings)

        return kernel

    def serial(backend, axis, shards):
        arrived.clear()
        slow = dataclasses.replace(backend, forward=waiting(backend.forward), backward=waiting(backend.backward))
        return over_context(slow, axis, shards)

    with mock.patch.object(ring, "_pass_on", recorded), mock.patch.object(ring, "over_context", serial):
        yield


VARIANTS: Mapping[str, Variant] = {
    "dense-scores": Variant(("scores",), {"attention.backend": "dense"}),
    "whole-logits": Variant(("logits",), {"model.head_chunk": sys.maxsize}),
    "remat-full": Variant(("forward-once",), {"remat": "full"}),
    "repeated-heads": Variant(("kv-heads",), patch=repeat_heads),
    "summed-gradients": Variant(("kv-gradients", "all-reduce"), {"attention.strategy": "gather"}, sum_everywhere),
    "gathered-table": Variant(("table",), patch=gather_table),
    "kept-rows": Variant(("kept-rows",), patch=keep_rows),
    "waiting-ring": Variant(("ring-overlap",), {"attention.strategy": "ring"}, wait_for_hops),
}
