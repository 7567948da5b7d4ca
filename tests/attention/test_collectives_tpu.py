"""What the TPU compiler makes of the collectives; compiles for chips that are not there."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

from vibethinker_jax.attention.attend import AttentionConfig, attend
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement

pytestmark = pytest.mark.slow

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 65_536, 16, 2, 128


@pytest.fixture(scope="module")
def compiled_for():
    """topology, mesh sizes, strategy -> (text of the optimised program, bytes of temporary memory)."""
    pytest.importorskip("libtpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    def compile_(topology, sizes, strategy):
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        placement = Placement(make_mesh(**sizes, devices=devices))
        config = AttentionConfig("blockwise", strategy)

        def both_passes(q, k, v, d_out, segments, positions):
            out, derivative = jax.vjp(
                lambda q, k, v: attend(q, k, v, segments, positions, placement=placement, config=config), q, k, v
            )
            return out, derivative(d_out)

        def array(dtype, *dimensions):
            axes, shape = zip(*dimensions, strict=True)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(axes, shape))

        tokens = ("batch", placement.size("replica", "fsdp")), ("sequence", LENGTH)
        heads = (array(jnp.bfloat16, *tokens, ("heads", h), (None, HEAD_DIM)) for h in (HEADS, KV_HEADS, KV_HEADS))
        q, k, v = heads
        given = q, k, v, q, array(jnp.int32, *tokens), array(jnp.int32, *tokens)
        program = jax.jit(both_passes).lower(*given).compile()
        return program.as_text(), program.memory_analysis().temp_size_in_bytes

    return compile_


def collectives(text):
    """(computation, operation, bits of dtype, elements) of each collective."""
    found, computation = [], ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0]
        match = re.match(
            r"\s*(?:ROOT )?\S+ = \(?[a-z]+(\d+)\[([\d,]*)\].*? (all-[a-z]+|[a-z]+-[a-z]+)(-start)?\(", line
        )
        if match and match[3] in ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"):
            shape = [int(x) for x in match[2].split(",") if x]
            size = 1
            for x in shape:
                size *= x
            found.append((computation, match[3], int(match[1]), size))
    return found


@pytest.mark.parametrize(("topology", "sizes"), [("v5e:4x4", {"context": 16}), ("v6e:4x4", {"context": 16})])
def test_gradients_of_gathered_keys_are_scattered_not_reduced_everywhere(compiled_for, topology, sizes):
    """A reduce-scatter of a TPU is a fused all-reduce and slice; an all-reduce that is not fused sends everything."""
    text, temporary = compiled_for(topology, sizes, "gather")
    reduced = [computation for computation, operation, *_ in collectives(text) if operation == "all-reduce"]
    scattered = [c for c in reduced if "all-reduce-scatter" in c]
    assert len(scattered) >= 2  # two stages; a compiler may put dK and dV together
    assert reduced == scattered
    assert "SingleInputAllReduceScatterFusion" in text
    # Gathered K and V, their float32 gradients (64 MiB each), blocks of scores; nothing quadratic in the row.
    assert temporary < 512 * 2**20


def test_a_ring_holds_a_few_shards_and_gathers_nothing(compiled_for):
    text, temporary = compiled_for("v5e:4x4", {"context": 16}, "ring")
    assert {operation for _, operation, *_ in collectives(text)} == {"collective-permute"}
    shard = LENGTH // 16 * KV_HEADS * HEAD_DIM
    sizes = [size for *_, size in collectives(text)]
    assert max(sizes) <= 2 * shard
    assert temporary < 256 * 2**20
