"""The chunked head against a dense float64 head that PyTorch differentiates, and numbers worked out by hand."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives import cross_entropy_sum, head_statistics

torch = pytest.importorskip("torch", reason="the oracle; it is in the test extra on Python 3.11")

VOCAB, PADDED, WIDTH = 11, 16, 6


def inputs(batch=3, length=40, vocab=VOCAB, padded=PADDED, width=WIDTH, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    hidden = (scale * rng.normal(size=(batch, length, width))).astype(np.float32)
    table = rng.normal(size=(padded, width)).astype(np.float32)  # padding rows hold numbers on purpose
    targets = rng.integers(0, vocab, size=(batch, length)).astype(np.int32)
    weights = (rng.random((batch, length)) < 0.7).astype(np.float32) * rng.normal(size=(batch, length)).astype(
        np.float32
    )
    return hidden, table, targets, weights


def dense(hidden, table, targets, weights, *, vocab=VOCAB, temperature=1.0, outer=1.0):
    """(log_probs, entropy, d hidden, d table) of outer * sum(weights * log_probs), by PyTorch in float64."""
    hidden, table = (torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (hidden, table))
    rows = torch.log_softmax(hidden @ table[:vocab].T / temperature, dim=-1)
    log_probs = torch.gather(rows, -1, torch.tensor(targets[..., None], dtype=torch.int64))[..., 0]
    (outer * (torch.tensor(weights, dtype=torch.float64) * log_probs).sum()).backward()
    return [x.detach().numpy() for x in (log_probs, -(rows.exp() * rows).sum(-1), hidden.grad, table.grad)]


@partial(jax.jit, static_argnames=("vocab", "temperature", "chunk", "shards", "batch_shards"))
def chunked(hidden, table, targets, weights, *, vocab=VOCAB, outer=1.0, **options):
    """The same four by the chunked head."""

    def loss(hidden, table):
        output = head_statistics(hidden, table, targets, vocab_size=vocab, with_entropy=True, **options)
        return outer * jnp.sum(weights * output.log_probs), output

    (_, output), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, table)
    return output.log_probs, output.entropy, *grads


def assert_close(actual, expected, rtol=2e-5, atol=2e-5):
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=rtol, atol=atol * max(1.0, np.abs(want).max()))


def test_three_logits_by_hand():
    # hidden (1, 2) on the unit vectors gives logits (1, 2) and the third row (1, 1) gives 3; the fourth row is padding.
    table = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [100.0, 100.0]])
    output = head_statistics(jnp.array([[[1.0, 2.0]]]), table, jnp.array([[1]]), vocab_size=3, with_entropy=True)
    total = math.exp(1) + math.exp(2) + math.exp(3)
    mean_logit = (1 * math.exp(1) + 2 * math.exp(2) + 3 * math.exp(3)) / total
    assert output.log_probs.shape == output.entropy.shape == (1, 1)
    assert float(output.log_probs[0, 0]) == pytest.approx(2 - math.log(total), abs=1e-6)
    assert float(output.entropy[0, 0]) == pytest.approx(math.log(total) - mean_logit, abs=1e-6)


@pytest.mark.parametrize("outer", [1.0, 2.0, 65528.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_both_gradients_equal_dense_float64_under_any_outer_scale(outer, temperature):
    arrays = inputs()
    expected = dense(*arrays, temperature=temperature, outer=outer)
    assert_close(chunked(*arrays, temperature=temperature, outer=outer, chunk=8), expected)


@pytest.mark.parametrize(
    ("chunk", "shards"), [(1, 1), (7, 1), (39, 1), (40, 1), (1000, 1), (8, 4), (7, 4), (3, 5), (9, 3)]
)
def test_chunks_and_shards_that_do_not_divide_change_nothing(chunk, shards):
    arrays = inputs()
    assert_close(chunked(*arrays, chunk=chunk, shards=shards), dense(*arrays))


@settings(max_examples=8, deadline=None)
@given(
    batch=st.sampled_from([1, 2, 6]),
    length=st.integers(1, 13),
    chunk=st.integers(1, 15),
    shards=st.integers(1, 4),
    batch_shards=st.sampled_from([1, 2]),
)
def test_any_split_gives_the_dense_result(batch, length, chunk, shards, batch_shards):
    arrays = inputs(batch=batch, length=length, seed=length)
    split = {"chunk": chunk, "shards": shards, "batch_shards": min(batch, batch_shards)}
    assert_close(chunked(*arrays, **split), dense(*arrays))


def test_one_token():
    arrays = inputs(batch=1, length=1)
    assert_close(chunked(*arrays), dense(*arrays))


def test_logits_of_ten_thousand_stay_finite_and_exact():
    # Rows (+-1e4) give logits +-1e4 and differences of exactly 1: log softmax of (0, -1, -2e4) at both ends.
    table = jnp.array([[1e4], [1e4 - 1], [-1e4]])
    hidden = jnp.ones((1, 3, 1))
    output, grads = jax.value_and_grad(
        lambda h, t: head_statistics(h, t, jnp.array([[0, 1, 2]]), vocab_size=3, chunk=2).log_probs.sum(),
        argnums=(0, 1),
    )(hidden, table)
    log_total = math.log1p(math.exp(-1))
    assert float(output) == pytest.approx(-3 * log_total - 1 - 2e4, rel=1e-6)
    # d/dlogit of the three targets: onehot - p, with p = (1, 1/e, 0) / (1 + 1/e); summed over the three positions
    p = np.array([1.0, math.exp(-1), 0.0]) / (1 + math.exp(-1))
    np.testing.assert_allclose(np.asarray(grads[1])[:, 0], 1 - 3 * p, atol=1e-6)
    assert np.isfinite(np.asarray(grads[0])).all()


def test_large_random_logits_equal_dense_float64():
    arrays = inputs(scale=3000.0)
    log_probs, entropy, *grads = chunked(*arrays, chunk=16)
    expected = dense(*arrays)
    np.testing.assert_allclose(np.asarray(log_probs), expected[0], rtol=1e-5, atol=2e-2)  # float32 spacing at 1e4: 1e-3
    assert np.isfinite(np.asarray(entropy)).all()
    assert all(np.isfinite(np.asarray(grad)).all() for grad in grads)


def test_padding_rows_have_no_probability_and_no_gradient():
    hidden, table, targets, weights = inputs()
    table[VOCAB:] = 50.0
    log_probs, _, _, table_grad = chunked(hidden, table, targets, weights, chunk=8)
    np.testing.assert_allclose(log_probs, dense(hidden, table, targets, weights)[0], rtol=2e-5, atol=2e-5)
    assert not np.asarray(table_grad)[VOCAB:].any()
    assert np.asarray(table_grad)[:VOCAB].all()


def test_a_target_outside_the_vocabulary_is_nan_and_leaves_the_others():
    hidden, table, targets, _ = inputs(batch=1, length=4)
    for bad in (VOCAB, PADDED, -1):
        targets[0, 2] = bad
        log_probs = np.asarray(head_statistics(hidden, table, targets, vocab_size=VOCAB).log_probs)
        assert np.isnan(log_probs).tolist() == [[False, False, True, False]]


def test_entropy_has_no_gradient_and_is_absent_unless_asked_for():
    hidden, table, targets, _ = inputs()
    assert head_statistics(hidden, table, targets, vocab_size=VOCAB).entropy is None
    grads = jax.grad(
        lambda h, t: head_statistics(h, t, targets, vocab_size=VOCAB, with_entropy=True).entropy.sum(), argnums=(0, 1)
    )(hidden, table)
    assert not any(np.asarray(grad).any() for grad in grads)


def test_bfloat16_hidden_states_give_a_float32_gradient_of_a_float32_table():
    hidden, table, targets, weights = inputs(length=100)
    rounded = jnp.asarray(hidden, jnp.bfloat16)
    log_probs, _, hidden_grad, table_grad = chunked(rounded, table, targets, weights, chunk=16)
    assert (log_probs.dtype, hidden_grad.dtype, table_grad.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    low = np.asarray(jnp.asarray(table, jnp.bfloat16), np.float32)  # the products see the rounded table
    expected = dense(np.asarray(rounded, np.float32), low, targets, weights)
    np.testing.assert_allclose(log_probs, expected[0], atol=1e-5)
    assert np.abs(np.asarray(table_grad) - expected[3]).max() < 2**-8 * np.abs(expected[3]).max()


def test_the_gradient_of_the_table_is_summed_in_float32_over_chunks():
    # Zero table, two tokens: p = 1/2, so each of 1,001 positions adds 1/2 to row 0. In bfloat16 the sum stalls at 128.
    hidden = jnp.ones((1, 1001, 1), jnp.bfloat16)
    targets = jnp.zeros((1, 1001), jnp.int32)
    grad = jax.grad(lambda table: head_statistics(hidden, table, targets, vocab_size=2, chunk=1).log_probs.sum())
    assert np.asarray(grad(jnp.zeros((2, 1)))).tolist() == [[500.5], [-500.5]]


def largest_array(jaxpr: Jaxpr) -> int:
    sizes = [math.prod(variable.aval.shape) for equation in jaxpr.eqns for variable in equation.outvars]
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(value, ClosedJaxpr | Jaxpr):
                sizes.append(largest_array(getattr(value, "jaxpr", value)))
    return max(sizes, default=0)


def test_no_array_holds_the_logits_of_more_than_one_chunk():
    hidden, table, targets, weights = inputs(batch=1, length=512, vocab=250, padded=256)
    program = jax.make_jaxpr(lambda *a: chunked(*a, vocab=250, chunk=16)[2:])(hidden, table, targets, weights)
    assert largest_array(program.jaxpr) == 16 * 256  # a whole row would be 512 * 256


def mesh(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values()), tuple(axes))


@pytest.mark.parametrize(("fsdp", "context", "tensor", "length"), [(1, 4, 2, 160), (2, 2, 2, 160), (1, 4, 2, 148)])
def test_sharded_equals_unsharded_and_the_vocabulary_is_not_gathered(fsdp, context, tensor, length):
    vocab, padded, width, batch = 1017, 1024, 24, 4
    arrays = inputs(batch=batch, length=length, vocab=vocab, padded=padded, width=width)
    devices = mesh(fsdp=fsdp, context=context, tensor=tensor)
    row = NamedSharding(devices, P("fsdp", "context"))
    placed = [
        NamedSharding(devices, P("fsdp", "context", None)),
        NamedSharding(devices, P(("context", "tensor"))),
        row,
        row,
    ]
    options = {"vocab": vocab, "chunk": 40, "shards": context, "batch_shards": fsdp}
    step = jax.jit(lambda *a: chunked(*a, **options), in_shardings=placed, out_shardings=(row, row, *placed[:2]))
    assert_close(step(*arrays), dense(*arrays, vocab=vocab))

    moved = {"while": [0], "main": [0]}  # elements moved by collectives, inside and outside the loops
    where = "main"
    for line in step.lower(*arrays).compile().as_text().splitlines():
        if line and not line.startswith(" "):
            where = "main" if line.startswith("ENTRY") else "while"
        if found := re.search(
            r"= (\S.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\S*\(", line
        ):
            shapes = re.findall(r"\w\d+\[([\d,]*)\]", found[1])
            moved[where] += [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    # A loop moves at most its chunk of hidden states. Once in all, the table's gradient is added over fsdp, in shards.
    assert 0 < max(moved["while"]) <= batch // fsdp * 40 * width
    assert max(moved["main"]) <= (padded // (context * tensor) * width if fsdp > 1 else 1)


def test_cross_entropy_sums_of_micro_batches_add_up_to_the_batch():
    # -(1 * -1 + 0.5 * -4) = 3 over 1.5, then -(1 * -2) = 2 over 1; together 5 / 2.5 = 2.
    log_probs = jnp.array([[-1.0, -4.0, jnp.nan], [-2.0, -jnp.inf, -7.0]])
    weights = jnp.array([[1.0, 0.5, 0.0], [1.0, 0.0, 0.0]])
    parts = [cross_entropy_sum(log_probs[i : i + 1], weights[i : i + 1]) for i in (0, 1)]
    assert [tuple(map(float, part)) for part in parts] == [(3.0, 1.5), (2.0, 1.0)]
    assert tuple(map(float, cross_entropy_sum(log_probs, weights))) == (5.0, 2.5)


def test_cross_entropy_of_padding_alone_is_zero_over_zero():
    assert tuple(map(float, cross_entropy_sum(jnp.full((2, 3), -jnp.inf), jnp.zeros((2, 3))))) == (0.0, 0.0)


def test_accumulated_gradients_of_unequal_micro_batches_equal_one_batch():
    hidden, table, targets, _ = inputs()
    weights = np.zeros((3, 40), np.float32)
    weights[0, :1], weights[1, :40], weights[2, 5:12] = 1, 1, 1  # 1, 40 and 7 trained tokens

    def loss_sum(table, rows):
        output = head_statistics(hidden[rows], table, targets[rows], vocab_size=VOCAB, chunk=16)
        return cross_entropy_sum(output.log_probs, weights[rows])

    pieces = [jax.grad(loss_sum, has_aux=True)(table, slice(i, i + 1)) for i in range(3)]
    accumulated = sum(grad for grad, _ in pieces) / sum(count for _, count in pieces)
    expected = dense(hidden, table, targets, -weights / 48)[3]
    np.testing.assert_allclose(np.asarray(accumulated), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"chunk": 0}, "chunk is 0"),
        ({"shards": 0}, "shards is 0"),
        ({"batch_shards": 2}, "batch_shards is 2"),
        ({"vocab_size": 17}, "vocab_size is 17"),
    ],
)
def test_bad_settings_are_named(options, named):
    hidden, table, targets, _ = inputs()
    with pytest.raises(UserError, match=re.escape(named)):
        head_statistics(hidden, table, targets, **({"vocab_size": VOCAB} | options))
