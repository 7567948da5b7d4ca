"""The block contract, on one device, without anything around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.reference import Result, assert_close, attention_float64, documents, example, hard_rows
from vibethinker_jax.attention import blockwise
from vibethinker_jax.attention.backends import BACKENDS, choose_backend, get_backend, resolve_blocks
from vibethinker_jax.attention.block_map import Blocks
from vibethinker_jax.attention.visibility import key_codes, query_bounds
from vibethinker_jax.errors import UserError

SEQ = 40
PORTABLE = ("dense", "blockwise")


@functools.partial(jax.jit, static_argnames=("name", "blocks"))
def both_passes(name, blocks, given):
    backend = get_backend(name, "cpu")
    q, k, v, d_out = (x.swapaxes(1, 2) for x in given[:4])
    seq = given.segments.shape[1]
    codes = query_bounds(given.segments, given.positions, seq), key_codes(given.segments, given.positions, seq)
    out, log_sum_exp = backend.forward(q, k, v, *codes, blocks=blocks)
    delta = jnp.sum(out * d_out.astype(jnp.float32), -1)
    gradients = backend.backward(q, k, v, *codes, d_out, log_sum_exp, delta, blocks=blocks)
    return Result(out.swapaxes(1, 2), log_sum_exp, *(x.swapaxes(1, 2) for x in gradients))


@pytest.fixture(scope="module")
def expected():
    return attention_float64(example(hard_rows(SEQ)))


@pytest.mark.parametrize(
    ("name", "blocks"), [("dense", (8, 8)), *(("blockwise", b) for b in ((8, 16), (16, 4), (7, 9), (64, 64)))]
)
def test_out_log_sum_exp_and_gradients_equal_the_definition(name, blocks, expected):
    """Sizes that do not divide the row of 40, larger ones, and different ones for queries and keys."""
    got = both_passes(name, Blocks(*blocks), example(hard_rows(SEQ)))
    assert_close(got, expected)
    hidden = example(hard_rows(SEQ)).segments == 0
    assert hidden.any()
    assert (np.asarray(got.log_sum_exp).swapaxes(1, 2)[hidden] == -np.inf).all()
    for x in (got.out, *got[2:]):
        np.testing.assert_array_equal(np.asarray(x)[hidden], 0)


@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.parametrize("heads", [(16, 2), (8, 1), (4, 4)])
def test_any_grouping_of_query_heads(name, heads):
    given = example([documents(9, 7, seq=18)], *heads)
    assert_close(both_passes(name, Blocks(4, 8), given), attention_float64(given))


@pytest.mark.parametrize("name", PORTABLE)
def test_large_logits_neither_overflow_nor_lose_the_softmax(name):
    given = example(hard_rows(SEQ))
    given = given._replace(q=given.q * 300)
    scores = np.einsum("bqd,bkd->bqk", given.q[:, :, 0], given.k[:, :, 0]) / np.sqrt(8)
    assert scores.max() > 1e3
    assert scores.min() < -1e3
    # A float32 score of 1e3 is off by up to 6e-5, and so is the logarithm of each weight.
    assert_close(both_passes(name, Blocks(8, 16), given), attention_float64(given), out=3e-4, gradients=0.05)


@pytest.mark.parametrize("name", PORTABLE)
def test_bfloat16_operands_accumulate_in_float32(name):
    """600 equal weights on values of one: a bfloat16 sum stops growing at 256."""
    given = example([documents(600, seq=600)], 2, 1)
    given = given._replace(q=given.q * 0, v=given.v * 0 + 1, d_out=given.d_out * 0 + 1)
    half = given._replace(**{x: jnp.asarray(getattr(given, x), jnp.bfloat16) for x in ("q", "k", "v", "d_out")})
    got = both_passes(name, Blocks(128, 128), half)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(got.out, 1, atol=4e-3)
    np.testing.assert_allclose(got.log_sum_exp[0, 0], np.log(np.arange(1, 601)), rtol=1e-5)
    # dv of a token: over both heads and all later queries, one over how many keys each of them sees.
    tail = 2 * np.cumsum(1 / np.arange(600, 0, -1.0))[::-1]
    np.testing.assert_allclose(got.dv[0, :, 0, 0], tail, rtol=4e-3)


def test_the_backward_pass_takes_a_part_of_the_keys(expected):
    """Gradients from two halves of the keys, each with the log-sum-exp over both, add up to those from all."""
    given = example(hard_rows(SEQ))
    q, k, v, d_out = (x.swapaxes(1, 2) for x in given[:4])
    queries = query_bounds(given.segments, given.positions, SEQ)
    keys = key_codes(given.segments, given.positions, SEQ)
    delta = np.sum(expected.out * given.d_out, -1).swapaxes(1, 2).astype(np.float32)
    statistics = d_out, expected.log_sum_exp.astype(np.float32), delta
    backward = jax.jit(functools.partial(blockwise.backward, blocks=Blocks(8, 8)))
    first, second = (
        backward(q, k[:, :, half], v[:, :, half], queries, keys[:, half], *statistics)
        for half in (slice(0, SEQ // 2), slice(SEQ // 2, None))
    )
    np.testing.assert_allclose((first[0] + second[0]).swapaxes(1, 2), expected.dq, atol=1e-5)
    for index, want in ((1, expected.dk), (2, expected.dv)):
        joined = np.concatenate([first[index], second[index]], 2)
        np.testing.assert_allclose(joined.swapaxes(1, 2), want, atol=1e-5)


@pytest.mark.parametrize("name", PORTABLE)
def test_a_query_with_an_infinite_log_sum_exp_has_and_gives_no_gradient(name):
    given = example([documents(8, seq=8)])
    q, k, v, d_out = (x.swapaxes(1, 2) for x in given[:4])
    codes = query_bounds(given.segments, given.positions, 8), key_codes(given.segments, given.positions, 8)
    hidden = np.full((1, 6, 8), -np.inf, np.float32)
    backward = jax.jit(functools.partial(get_backend(name, "cpu").backward, blocks=Blocks(4, 4)))
    for gradient in backward(q, k, v, *codes, d_out, hidden, np.ones_like(hidden)):
        np.testing.assert_array_equal(gradient, 0)


def poisoned_blocks(results, reach):
    """Which of 5 blocks of 8 tokens hold a NaN, for each block that was poisoned."""
    return np.stack([np.isnan(np.asarray(getattr(r, reach))[0]).any((1, 2)).reshape(5, 8).any(1) for r in results])


def test_blocks_of_scores_without_a_visible_pair_are_not_computed():
    """A NaN in the keys of a block reaches every query whose block of scores is computed, hidden or not."""
    # Documents of 16, 4, 13 and 1 tokens, padding of 6, in blocks of 8: blocks (query, key) with a visible pair.
    given = example([documents(16, 4, 13, 1, seq=SEQ)])
    visited = np.zeros((5, 5), bool)
    for query, key in [(0, 0), (1, 0), (1, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 3), (4, 4)]:
        visited[query, key] = True
    runs = []
    for block in range(5):
        k, d_out = given.k.copy(), given.d_out.copy()
        k[0, 8 * block : 8 * block + 8] = np.nan
        d_out[0, 8 * block : 8 * block + 8] = np.nan
        runs.append(
            (
                both_passes("blockwise", Blocks(8, 8), given._replace(k=k)),
                both_passes("blockwise", Blocks(8, 8), given._replace(d_out=d_out)),
            )
        )
    np.testing.assert_array_equal(poisoned_blocks([keys for keys, _ in runs], "out"), visited.T)
    np.testing.assert_array_equal(poisoned_blocks([queries for _, queries in runs], "dv"), visited)


def test_pruning_changes_no_bit(monkeypatch):
    given = example(hard_rows(SEQ))
    pruned = both_passes("blockwise", Blocks(8, 4), given)

    def everything(rows, columns, batch):
        every = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), (batch, rows, columns))
        return every, jnp.ones_like(every), jnp.full((batch, rows), columns, jnp.int32)

    monkeypatch.setattr(blockwise, "block_map", lambda *_: everything(5, 10, 4))
    monkeypatch.setattr(blockwise, "transposed_block_map", lambda *_: everything(10, 5, 4))
    # A new function: jit would otherwise find the trace of the first call.
    whole = jax.jit(lambda given: both_passes.__wrapped__("blockwise", Blocks(8, 4), given))(given)
    for name, got, want in zip(Result._fields, pruned, whole, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_auto_takes_the_kernels_on_tpu_and_blocks_where_scores_grow_large():
    assert choose_backend("auto", "tpu", 64, 128) == "pallas"
    assert choose_backend("auto", "tpu", 65_536, 256, sharded=True) == "pallas"
    assert choose_backend("auto", "tpu", 65_536, 64) == "pallas"
    assert choose_backend("auto", "tpu", 65_536, 96) == "blockwise"
    assert choose_backend("auto", "cpu", 1024, 128) == "dense"
    assert choose_backend("auto", "cpu", 1025, 128) == "blockwise"
    assert choose_backend("auto", "gpu", 64, 128, sharded=True) == "blockwise"
    for name in BACKENDS:
        assert choose_backend(name, "cpu", 64, 16) == name


def test_block_sizes_default_to_the_backend_and_do_not_exceed_the_sequence():
    assert resolve_blocks(0, 0, Blocks(512, 1024), 4096, 65_536) == Blocks(512, 1024)
    assert resolve_blocks(0, 0, Blocks(512, 1024), 130, 40) == Blocks(256, 128)
    assert resolve_blocks(64, 2048, Blocks(512, 1024), 130, 40) == Blocks(64, 2048)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(UserError, match="'flash'; choose one of auto, dense, blockwise, pallas"):
        get_backend("flash", "cpu")
