"""`attend` with rows, heads and the sequence sharded over devices: the same function as the definition."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.reference import attention_float64, documents, example, hard_rows
from vibethinker_jax.attention.attend import AttentionConfig, attend
from vibethinker_jax.attention.ring import merge
from vibethinker_jax.attention.zigzag import inverse_order, zigzag_order
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import UNPLACED, Placement

SEQ = 48
BLOCKS = {"block_q": 4, "block_kv": 8}


class Case(NamedTuple):
    """mesh: sizes of (replica, fsdp, context, tensor), or nothing."""

    mesh: tuple[int, int, int, int] | None
    heads: tuple[int, int] = (6, 2)
    rows: str = "hard"
    layout: str = "zigzag"
    backend: str = "blockwise"

    @property
    def context(self):
        return self.mesh[2] if self.mesh else 1

    def placement(self):
        if self.mesh is None:
            return UNPLACED
        return Placement(make_mesh(*self.mesh, devices=jax.devices()[: math.prod(self.mesh)]))


# Rows: four hard ones, with edges where 4 shards have theirs; or three that no mesh divides.
ROWS = {
    "hard": hard_rows(SEQ),
    "odd": [documents(45, seq=45), documents(20, 7, 1, seq=45), documents(30, 15, seq=45)],
}
CASES = {
    "context 2, batch over replica and fsdp": Case((2, 2, 2, 1)),
    "context 3": Case((1, 1, 3, 1)),
    "context 4, contiguous, whole shards hidden": Case((1, 2, 4, 1), layout="contiguous"),
    "context 4": Case((1, 1, 4, 1), (8, 1)),
    "context 8": Case((1, 1, 8, 1), (4, 4), backend="dense"),
    "a KV head per tensor shard": Case((1, 2, 2, 2), (16, 2)),
    "two tensor shards per KV head": Case((1, 1, 2, 4), (16, 2)),
}
WITHOUT_STRATEGY = {
    "one device": Case(None),
    "tensor alone": Case((1, 1, 1, 4), (8, 2), backend="auto"),
    "nothing divides": Case((1, 2, 2, 2), (3, 1), "odd", layout="contiguous", backend="auto"),
    "query heads of a shard read parts of groups": Case((1, 1, 2, 2), (6, 3), backend="dense"),
}


@functools.cache
def given(heads, rows):
    return example(ROWS[rows], *heads)


@functools.cache
def expected(heads, rows):
    return attention_float64(given(heads, rows))


@functools.cache
def compiled(case, strategy="gather"):
    """(q, k, v, d_out, segments, positions) in the order of `case.layout` -> (out, dq, dk, dv)."""
    config, placement = AttentionConfig(case.backend, strategy, **BLOCKS), case.placement()

    def run(q, k, v, d_out, segments, positions):
        attention = functools.partial(attend, placement=placement, config=config)
        out, derivative = jax.vjp(lambda q, k, v: attention(q, k, v, segments, positions), q, k, v)
        return out, *derivative(d_out)

    return jax.jit(run)


def run(case, strategy, inputs):
    """Results in the order of the inputs."""
    order = np.arange(inputs.segments.shape[1])
    if case.layout == "zigzag":
        order = zigzag_order(len(order), case.context)
    return [np.asarray(x)[:, inverse_order(order)] for x in compiled(case, strategy)(*inputs.reordered(order))]


def check(case, strategy):
    out, *gradients = run(case, strategy, given(case.heads, case.rows))
    want = expected(case.heads, case.rows)
    np.testing.assert_allclose(out, want.out, atol=2e-6)
    for name, got, gradient in zip(("dq", "dk", "dv"), gradients, want[2:], strict=True):
        np.testing.assert_allclose(got, gradient, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("strategy", ["gather", "ring"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_sharded_sequence_gives_what_one_device_gives(case, strategy):
    check(case, strategy)


@pytest.mark.parametrize("case", WITHOUT_STRATEGY.values(), ids=WITHOUT_STRATEGY)
def test_what_the_mesh_does_not_divide_is_computed_whole(case):
    check(case, "gather")


@pytest.mark.parametrize(
    ("case", "strategy"),
    [("one device", "gather"), ("context 4", "gather"), ("context 4", "ring")],
)
def test_a_token_reaches_only_itself_and_what_follows_in_its_document(case, strategy):
    """Down to the last bit: no earlier token, other document or other row takes part in a sum."""
    case = (CASES | WITHOUT_STRATEGY)[case]
    inputs = given(case.heads, case.rows)
    before = run(case, strategy, inputs)[0]
    for row, token in ((0, 20), (1, 13), (2, 3)):
        q, k, v = (x.copy() for x in inputs[:3])
        for x in (q, k, v):
            x[row, token] += 1
        after = run(case, strategy, inputs._replace(q=q, k=k, v=v))[0]
        changed = (before != after).any((2, 3))
        reached = np.zeros_like(changed)
        same = inputs.segments[row] == inputs.segments[row, token]
        reached[row] = same & (inputs.positions[row] >= inputs.positions[row, token])
        np.testing.assert_array_equal(changed, reached)


@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_bfloat16_in_bfloat16_out_also_for_the_gradients(strategy):
    case = CASES["context 3"]
    half = given(case.heads, case.rows)
    half = half._replace(**{x: jnp.asarray(getattr(half, x), jnp.bfloat16) for x in ("q", "k", "v", "d_out")})
    got = run(case, strategy, half)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    want = attention_float64(half._replace(**{x: np.float32(getattr(half, x)) for x in ("q", "k", "v", "d_out")}))
    for result, exact in zip(got, (want.out, want.dq, want.dk, want.dv), strict=True):
        # Results are rounded to 8 bits, and so are the weights and their gradients before they are multiplied.
        np.testing.assert_allclose(np.float32(result), exact, atol=0.01 * np.abs(exact).max())


def test_parts_without_keys_leave_a_merge_as_it_was():
    random = np.random.default_rng(0)
    out = random.normal(size=(1, 2, 4, 3)).astype(np.float32)
    total = np.array([[[0.5, 900.0, -np.inf, -800.0], [1.0, -np.inf, -np.inf, 2.0]]], np.float32)
    out[np.isinf(total)] = 0
    nothing = np.zeros_like(out), np.full_like(total, -np.inf)
    for sides in ((out, total, *nothing), (*nothing, out, total)):
        merged, log_sum_exp = merge(*map(jnp.asarray, sides))
        np.testing.assert_array_equal(merged, out)
        np.testing.assert_array_equal(log_sum_exp, total)


def test_a_merge_weighs_both_parts():
    """exp(log 3) and exp(log 1): weights 3/4 and 1/4; the sum is 4."""
    shape = (1, 1, 1, 1)
    merged, log_sum_exp = merge(
        jnp.full(shape, 8.0), jnp.full(shape[:3], np.log(3.0)), jnp.full(shape, -4.0), jnp.zeros(shape[:3])
    )
    np.testing.assert_allclose(merged[0, 0, 0, 0], 8 * 0.75 - 4 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(log_sum_exp[0, 0, 0], np.log(4.0), rtol=1e-6)
