"""The TPU kernels, interpreted on CPU; whether they compile for TPUs is in the tests marked slow."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.attention.reference import Result, assert_close, attention_float64, documents, example, hard_rows
from vibethinker_jax.attention import pallas_backward
from vibethinker_jax.attention.block_map import BlockMap, Blocks
from vibethinker_jax.attention.pallas_backward import backward
from vibethinker_jax.attention.pallas_common import column_of, is_first, is_last, kind_of, list_steps, row_of
from vibethinker_jax.attention.pallas_forward import forward
from vibethinker_jax.attention.visibility import key_codes, query_bounds
from vibethinker_jax.attention.zigzag import zigzag_order
from vibethinker_jax.errors import UserError

SEQ = 48


def run(given, blocks, interpret=True):
    """Both kernels on a whole row, in the layout of the reference."""
    q, k, v, d_out = (x.swapaxes(1, 2) for x in given[:4])
    seq = given.segments.shape[1]
    codes = query_bounds(given.segments, given.positions, seq), key_codes(given.segments, given.positions, seq)
    out, log_sum_exp = forward(q, k, v, *codes, blocks=blocks, interpret=interpret)
    delta = jnp.sum(out * d_out.astype(jnp.float32), -1)
    gradients = backward(q, k, v, *codes, d_out, log_sum_exp, delta, blocks=blocks, interpret=interpret)
    return Result(out.swapaxes(1, 2), log_sum_exp, *(x.swapaxes(1, 2) for x in gradients))


both_passes = jax.jit(run, static_argnames="blocks")


@pytest.fixture(scope="module")
def expected():
    return attention_float64(example(hard_rows(SEQ)))


@pytest.mark.parametrize("blocks", [(16, 8), (32, 40), (512, 1024)])
def test_out_log_sum_exp_and_gradients_equal_the_definition(blocks, expected):
    """Blocks that divide the row of 48, that do not, and that exceed it."""
    given = example(hard_rows(SEQ))
    got = both_passes(given, Blocks(*blocks))
    assert_close(got, expected)
    hidden = given.segments == 0
    assert hidden.any()
    assert (np.asarray(got.log_sum_exp).swapaxes(1, 2)[hidden] == -np.inf).all()
    for x in (got.out, *got[2:]):
        np.testing.assert_array_equal(np.asarray(x)[hidden], 0)


def test_the_order_of_tokens_in_a_row_does_not_matter(expected):
    order = zigzag_order(SEQ, 4)
    got = both_passes(example(hard_rows(SEQ)).reordered(order), Blocks(8, 16))
    per_token = Result(*(x[:, order] if x.ndim == 4 else x[:, :, order] for x in expected))
    assert_close(got, per_token)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_any_grouping_of_query_heads(heads):
    given = example([documents(9, 7, seq=18)], *heads)
    assert_close(both_passes(given, Blocks(8, 8)), attention_float64(given))


def test_large_logits_neither_overflow_nor_lose_the_softmax():
    given = example(hard_rows(SEQ))
    given = given._replace(q=given.q * 300)
    # A float32 score of 1e3 is off by up to 6e-5, and so is the logarithm of each weight.
    assert_close(both_passes(given, Blocks(16, 8)), attention_float64(given), out=3e-4, gradients=0.05)


def test_bfloat16_operands_accumulate_in_float32():
    """600 equal weights on values of one: a bfloat16 sum stops growing at 256."""
    given = example([documents(600, seq=600)], 2, 1)
    given = given._replace(q=given.q * 0, v=given.v * 0 + 1, d_out=given.d_out * 0 + 1)
    half = given._replace(**{x: jnp.asarray(getattr(given, x), jnp.bfloat16) for x in ("q", "k", "v", "d_out")})
    got = both_passes(half, Blocks(128, 128))
    assert {x.dtype for x in got} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(got.out, 1, atol=4e-3)
    np.testing.assert_allclose(got.log_sum_exp[0, 0], np.log(np.arange(1, 601)), rtol=1e-5)
    # dv of a token: over both heads and all later queries, one over how many keys each of them sees.
    tail = 2 * np.cumsum(1 / np.arange(600, 0, -1.0))[::-1]
    np.testing.assert_allclose(got.dv[0, :, 0, 0], tail, rtol=4e-3)


def test_bfloat16_gradients_stay_close_to_the_definition():
    given = example([documents(30, 15, seq=SEQ)])
    rounded = given._replace(
        **{x: np.asarray(jnp.asarray(getattr(given, x), jnp.bfloat16), np.float32) for x in ("q", "k", "v", "d_out")}
    )
    half = rounded._replace(**{x: jnp.asarray(getattr(rounded, x), jnp.bfloat16) for x in ("q", "k", "v", "d_out")})
    # Probabilities and their gradients are rounded to 8 bits before they are multiplied.
    assert_close(both_passes(half, Blocks(16, 16)), attention_float64(rounded), out=0.02, gradients=0.05)


def test_a_part_of_the_queries_against_parts_of_the_keys(expected):
    """Shards of unequal length: outputs merged by log-sum-exp, gradients added, equal those over all keys."""
    given = example(hard_rows(SEQ))
    q, k, v, d_out = (x.swapaxes(1, 2) for x in given[:4])
    some = slice(16, 40)
    queries = query_bounds(given.segments[:, some], given.positions[:, some], SEQ)
    keys = key_codes(given.segments, given.positions, SEQ)
    log_sum_exp = expected.log_sum_exp[:, :, some].astype(np.float32)
    delta = np.sum(expected.out * given.d_out, -1).swapaxes(1, 2).astype(np.float32)[:, :, some]
    shared = {"blocks": Blocks(8, 8), "interpret": True}
    merged, d_query = 0, 0
    for part in (slice(0, 13), slice(13, SEQ)):
        arrays = q[:, :, some], k[:, :, part], v[:, :, part], queries, keys[:, part]
        out, local = jax.jit(functools.partial(forward, **shared))(*arrays)
        assert not np.isnan(out).any()
        merged += np.where(np.isneginf(log_sum_exp), 0, np.exp(local - log_sum_exp))[..., None] * out
        gradients = jax.jit(functools.partial(backward, **shared))(*arrays, d_out[:, :, some], log_sum_exp, delta)
        assert not any(np.isnan(x).any() for x in gradients)
        d_query += gradients[0]
    np.testing.assert_allclose(merged.swapaxes(1, 2), expected.out[:, some], atol=2e-6)
    np.testing.assert_allclose(d_query.swapaxes(1, 2), expected.dq[:, some], atol=1e-5)


def test_queries_whose_gradient_does_not_fit_are_taken_in_chunks(monkeypatch, expected):
    # 3 heads of 8, float32: room for one block of 16 queries of 48, so three chunks.
    monkeypatch.setattr(pallas_backward, "RESIDENT_BYTES", 3 * 8 * 4 * 16 + 1)
    assert_close(jax.jit(lambda given: run(given, Blocks(16, 16)))(example(hard_rows(SEQ))), expected)


def test_blocks_of_scores_without_a_visible_pair_are_not_computed():
    """A NaN in the values of a block reaches every query whose block of scores is computed, hidden or not."""
    # Documents of 16, 4, 13 and 1 tokens, padding of 6, in blocks of 8: blocks (query, key) with a visible pair.
    given = example([documents(16, 4, 13, 1, seq=40)])
    visited = np.zeros((5, 5), bool)
    for query, key in [(0, 0), (1, 0), (1, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 3), (4, 4)]:
        visited[query, key] = True
    for block in range(5):
        v, d_out = given.v.copy(), given.d_out.copy()
        v[0, 8 * block : 8 * block + 8] = np.nan
        d_out[0, 8 * block : 8 * block + 8] = np.nan
        reached = both_passes(given._replace(v=v), Blocks(8, 8)).out
        np.testing.assert_array_equal(np.isnan(reached[0]).any((1, 2)).reshape(5, 8).any(1), visited[:, block])
        reached = both_passes(given._replace(d_out=d_out), Blocks(8, 8)).dv
        np.testing.assert_array_equal(np.isnan(reached[0]).any((1, 2)).reshape(5, 8).any(1), visited[block])


def test_memory_that_nobody_wrote_is_not_read():
    """The simulated TPU fills buffers with NaN and checks every access; the second row has a document in one block."""
    given = example([documents(20, 12, seq=32), documents(5, seq=32)], 4, 2)
    params = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(lambda given: run(given, Blocks(16, 8), params))(given)
    assert_close(got, attention_float64(given))


def test_steps_list_active_blocks_row_by_row_and_visit_empty_rows_once():
    columns = jnp.array([[[0, 2, 2], [0, 0, 0]], [[1, 1, 1], [0, 1, 2]]], jnp.int32)
    kinds = jnp.array([[[2, 1, 0], [0, 0, 0]], [[1, 0, 0], [2, 2, 1]]], jnp.int32)
    steps = list_steps(BlockMap(columns, kinds, jnp.array([[2, 0], [1, 3]], jnp.int32)))
    assert steps.steps_per_row == 6
    assert int(steps.longest) == 4
    fields = [f(steps.packed).reshape(2, 6)[:, :4].tolist() for f in (row_of, column_of, kind_of, is_first, is_last)]
    assert fields == [
        [[0, 0, 1, 1], [0, 1, 1, 1]],
        [[0, 2, 0, 0], [1, 0, 1, 2]],
        [[2, 1, 0, 0], [1, 2, 2, 1]],
        [[1, 0, 1, 0], [1, 1, 0, 0]],
        [[0, 1, 1, 0], [1, 0, 0, 1]],
    ]


def test_sizes_that_a_kernel_cannot_tile_are_refused():
    given = example([documents(600, seq=600)], 2, 1)
    with pytest.raises(UserError, match=r"block_kv is 200: .* multiple of 128"):
        run(given, Blocks(128, 200))
    with pytest.raises(UserError, match=r"block_q is 64: .* multiple of 128"):
        run(given._replace(**{x: np.zeros((1, 600, 1, 64)) for x in "qkv"}), Blocks(64, 128), interpret=False)
    with pytest.raises(UserError, match=r"head_dim is 8: .* multiple of 64"):
        run(given, Blocks(128, 128), interpret=False)
    with pytest.raises(UserError, match="enlarge block_q or block_kv"):
        list_steps(BlockMap(*(jnp.zeros((2, 512, 512), jnp.int32),) * 2, jnp.zeros((2, 512), jnp.int32)))


COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from vibethinker_jax.attention.pallas_backward import backward
from vibethinker_jax.attention.pallas_common import DEFAULT_BLOCKS
from vibethinker_jax.attention.pallas_forward import forward
from vibethinker_jax.attention.visibility import Queries
topology, dtype, heads, kv_heads, head_dim, queries, keys = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
def array(*shape, dtype=dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))
q, kv = array(1, heads, queries, head_dim), array(1, kv_heads, keys, head_dim)
codes = Queries(*[array(1, queries, dtype=jnp.int32)] * 2), array(1, keys, dtype=jnp.int32)
statistic = array(1, heads, queries, dtype=jnp.float32)
blocks = DEFAULT_BLOCKS
jax.jit(lambda *x: forward(*x, blocks=blocks)).lower(q, kv, kv, *codes).compile()
compiled = jax.jit(lambda *x: backward(*x, blocks=blocks)).lower(q, kv, kv, *codes, q, statistic, statistic).compile()
print(compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "keys"),
    [("bfloat16", 16, 2, 128, 65536), ("bfloat16", 14, 2, 64, 4096), ("float32", 16, 2, 128, 4096)],
)
def test_kernels_compile_for_tpus_in_bounded_memory(topology, dtype, heads, kv_heads, head_dim, keys):
    pytest.importorskip("libtpu")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    shapes = map(str, (heads, kv_heads, head_dim, 4096, keys))
    command = [sys.executable, "-c", COMPILE, topology, dtype, *shapes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # dQ before it is transposed, and little else; one dQ per block of keys would be 4 GiB.
    # (A narrow head fills whole lanes of 128.)
    assert int(done.stdout) < 2 * heads * 4096 * max(head_dim, 128) * 4 + 2**23
