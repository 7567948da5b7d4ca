"""The vocabulary-parallel embedding: equal to indexing the table, on every mesh, forward and backward."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vibethinker_jax.models.embedding import embed
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import UNPLACED, Placement

VOCAB, HIDDEN = 48, 8

MESHES = [
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"context": 4, "tensor": 2},
    {"replica": 2, "fsdp": 4},
    {"replica": 2, "context": 4},
]


@pytest.fixture(scope="module")
def table():
    return jax.random.normal(jax.random.key(0), (VOCAB, HIDDEN))


def run(table, tokens, weights, placement, dtype):
    def weighted(table):
        rows = embed(table, tokens, placement, dtype)
        return jnp.sum(rows.astype(jnp.float32) * weights), rows

    (_, rows), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(table)
    return np.asarray(rows.astype(jnp.float32)), np.asarray(gradient)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("batch", [8, 1])
def test_rows_and_gradients_equal_plain_indexing(table, sizes, batch):
    placement = Placement(make_mesh(**sizes))
    # Every token twice in a batch of 8 rows, so that gradients add up over devices.
    tokens = jax.random.randint(jax.random.key(1), (batch, 40), 0, VOCAB)
    weights = jax.random.normal(jax.random.key(2), (batch, 40, HIDDEN))
    placed = jax.device_put(table, placement.sharding(("vocab", "table_embed"), table.shape))
    rows, gradient = run(placed, tokens, weights, placement, jnp.float32)
    np.testing.assert_array_equal(rows, np.asarray(table)[np.asarray(tokens)])
    expected = np.zeros((VOCAB, HIDDEN), np.float64)
    np.add.at(expected, np.asarray(tokens), np.asarray(weights, np.float64))
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


def test_the_gradient_is_summed_in_float32_beside_bfloat16_activations(table):
    # 4,096 cotangents of 1 for one row: bfloat16 would stop counting at 256.
    tokens = jnp.full((8, 512), 5)
    placement = Placement(make_mesh(fsdp=2, context=4))
    for where in (placement, UNPLACED):
        placed = jax.device_put(table, where.sharding(("vocab", "table_embed"), table.shape)) if where.mesh else table
        rows, gradient = run(placed, tokens, jnp.ones((8, 512, HIDDEN)), where, jnp.bfloat16)
        np.testing.assert_array_equal(rows[0, 0], np.asarray(table[5].astype(jnp.bfloat16).astype(jnp.float32)))
        assert gradient[5].tolist() == [4096.0] * HIDDEN
        assert not gradient[np.arange(VOCAB) != 5].any()


def test_no_collective_carries_the_table():
    vocab, hidden = 4096, 32
    placement = Placement(make_mesh(fsdp=2, context=4))
    sharding = placement.sharding(("vocab", "table_embed"), (vocab, hidden))
    table = jax.ShapeDtypeStruct((vocab, hidden), jnp.float32, sharding=sharding)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32, sharding=placement.sharding(("batch", "sequence"), (2, 64)))

    def gradient(table, tokens):
        return jax.grad(lambda t: jnp.sum(embed(t, tokens, placement, jnp.bfloat16).astype(jnp.float32) ** 2))(table)

    text = jax.jit(gradient, out_shardings=sharding).lower(table, tokens).compile().as_text()
    collectives = re.findall(r"= (\S+) (?:all-gather|all-reduce|reduce-scatter|all-to-all)\(", text)
    assert collectives
    for shape in collectives:
        sizes = [int(n) for n in re.findall(r"\d+", shape.split("[")[1].split("]")[0])]
        assert int(np.prod(sizes)) < vocab * hidden // 8, shape
