"""The HLO reader on programs that XLA compiled for eight CPU devices, whose FLOPs and bytes are known."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.planning.chips import Chip
from vibethinker_jax.planning.collectives import bytes_by_axes, collectives
from vibethinker_jax.planning.flops import executed_flops
from vibethinker_jax.planning.hlo import parse
from vibethinker_jax.planning.roofline import estimate

MESH = {"replica": 1, "fsdp": 2, "context": 4, "tensor": 1}


def compiled_text(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile().as_text()


def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_a_scan_of_products_counts_every_turn() -> None:
    text = compiled_text(layers, (24, 40), (7, 40, 40))
    assert executed_flops(parse(text), {}) == 7 * 2 * 24 * 40 * 40


@pytest.mark.parametrize(("remat", "products"), [(False, 3), (True, 4)])
def test_recomputation_in_the_backward_pass_is_executed_work(remat: bool, products: int) -> None:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(x @ w), None

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jnp.sum(jax.lax.scan(body, x, weights)[0])

    text = compiled_text(jax.grad(loss, argnums=(0, 1)), (24, 40), (7, 40, 40))
    assert executed_flops(parse(text), {}) == products * 7 * 2 * 24 * 40 * 40


def test_collectives_of_a_shard_map_go_to_their_axes() -> None:
    mesh = make_mesh(**MESH)

    def exchange(x: jax.Array) -> jax.Array:  # per device [3, 5] float32: 60 bytes
        gathered = jax.lax.all_gather(x, "context", axis=0, tiled=True)  # 4 x 60
        summed = jax.lax.psum(gathered * 2, "fsdp")  # 240

        def hop(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.ppermute(carry, "context", [(i, (i + 1) % 4) for i in range(4)]), None

        turned, _ = jax.lax.scan(hop, x, None, length=6)  # 6 x 60
        return turned + jnp.sum(summed)

    spec = PartitionSpec(("fsdp", "context"))
    text = compiled_text(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec), (24, 5))
    assert bytes_by_axes(collectives(parse(text), MESH)) == {
        "context": {"all-gather": 240, "collective-permute": 360},
        "fsdp": {"all-reduce": 240},
    }


def test_the_estimate_is_bound_by_flops_or_by_memory() -> None:
    module = parse(compiled_text(lambda a, b: a @ b, (64, 32), (32, 128)))
    flops, moved = 2 * 64 * 32 * 128, 4 * (64 * 32 + 32 * 128 + 64 * 128)
    slow = Chip(bf16_flops=1e3, hbm_bandwidth=1e9, host_bandwidth=1.0, link_bandwidth=1.0)
    seconds = estimate(module, [], {}, slow)
    assert seconds.hbm_bytes == moved
    assert seconds.total == pytest.approx(flops / 1e3)
    narrow = Chip(bf16_flops=1e12, hbm_bandwidth=1e2, host_bandwidth=1.0, link_bandwidth=1.0)
    assert estimate(module, [], {}, narrow).total == pytest.approx(moved / 1e2)


def test_a_loop_over_slices_moves_each_slice_once() -> None:
    module = parse(compiled_text(layers, (24, 40), (7, 40, 40)))
    chip = Chip(bf16_flops=1e12, hbm_bandwidth=1e9, host_bandwidth=1.0, link_bandwidth=1.0)
    # Per turn: the slice of the weights and the state, read and written a few times; never all seven matrices.
    assert estimate(module, [], {}, chip).hbm_bytes < 7 * 4 * (4 * 40 * 40 + 8 * 24 * 40)
