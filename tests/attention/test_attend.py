"""What `attend` traces to: how often kernels run, what is kept, what crosses the links; and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import pytest

from vibethinker_jax.attention import blockwise
from vibethinker_jax.attention.attend import LOG_SUM_EXP_NAME, OUT_NAME, AttentionConfig, attend
from vibethinker_jax.attention.cost import GATHER_BUDGET_BYTES, choose_strategy, gathered_bytes
from vibethinker_jax.errors import UserError
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import UNPLACED, Placement

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 3, 32, 8, 2, 4, 4
SAVE_NAMED = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LOG_SUM_EXP_NAME)


@pytest.fixture(scope="module")
def context_placement():
    return Placement(make_mesh(context=CONTEXT, devices=jax.devices()[:CONTEXT]))


@pytest.fixture
def kernel_calls(monkeypatch):
    """Gives the blockwise functions names that a jaxpr shows; counts how often they are traced."""
    traced = {"forward_kernel": 0, "backward_kernel": 0}

    def named(name, function):
        def kernel(*arguments, blocks):
            def body(*arguments):
                traced[name] += 1
                return function(*arguments, blocks=blocks)

            body.__name__ = name
            return jax.jit(body)(*arguments)

        return kernel

    monkeypatch.setattr(blockwise, "forward", named("forward_kernel", blockwise.forward))
    monkeypatch.setattr(blockwise, "backward", named("backward_kernel", blockwise.backward))
    return traced


def inputs(dtype=jnp.float32):
    heads = (jax.ShapeDtypeStruct((BATCH, SEQ, h, HEAD_DIM), dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    return *heads, *[jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)] * 2


def attention(placement, strategy="gather"):
    return functools.partial(attend, placement=placement, config=AttentionConfig("blockwise", strategy))


def gradients(placement, strategy, policy=None):
    def layer(q, k, v, segments, positions):
        return jnp.sum(attention(placement, strategy)(q * 2, k * 2, v * 2, segments, positions) ** 2)

    return jax.grad(jax.checkpoint(layer, policy=policy) if policy else layer, argnums=(0, 1, 2))


def equations(jaxpr):
    """(equation, the jaxpr that it is in), in order, through all nested jaxprs."""
    for equation in jaxpr.eqns:
        yield equation, jaxpr
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


def traced_equations(function, dtype=jnp.float32):
    return list(equations(jax.make_jaxpr(function)(*inputs(dtype)).jaxpr))


def count_kernels(function):
    """Either pass of "blockwise" has one loop over the blocks of a row, and nothing else here has one."""
    return [equation.primitive.name for equation, _ in traced_equations(function)].count("while")


@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_saving_the_named_results_spares_the_second_forward_kernel(context_placement, strategy):
    saved = gradients(context_placement, strategy, SAVE_NAMED)
    recomputed = gradients(context_placement, strategy, jax.checkpoint_policies.nothing_saveable)
    assert count_kernels(saved) == 2
    assert count_kernels(recomputed) == 3


@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_arguments_result_and_log_sum_exp_are_all_that_the_backward_pass_keeps(context_placement, strategy):
    given = inputs(jnp.bfloat16)
    differentiable = attention(context_placement, strategy)
    kept = jax.eval_shape(
        lambda q, k, v, *tokens: jax.vjp(lambda q, k, v: differentiable(q, k, v, *tokens), q, k, v)[1], *given
    )
    result = jax.ShapeDtypeStruct((BATCH, SEQ, HEADS, HEAD_DIM), jnp.bfloat16)
    log_sum_exp = jax.ShapeDtypeStruct((BATCH, HEADS, SEQ), jnp.float32)
    described = sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(kept))
    assert described == sorted((x.shape, str(x.dtype)) for x in (*given, result, log_sum_exp))


def test_gathering_sends_single_kv_heads_and_scatters_their_gradients(context_placement):
    found = traced_equations(gradients(context_placement, "gather"), jnp.bfloat16)
    shapes = {
        name: {
            (equation.invars[0].aval.shape, str(equation.invars[0].aval.dtype))
            for equation, _ in found
            if equation.primitive.name == name
        }
        for name in ("all_gather", "reduce_scatter", "psum", "ppermute")
    }
    width = BATCH * KV_HEADS * HEAD_DIM
    assert shapes["all_gather"] == {((SEQ // CONTEXT, width), "bfloat16"), ((BATCH, SEQ // CONTEXT), "int32")}
    # In two stages of two: whole rows first, then halves.
    assert shapes["reduce_scatter"] == {((SEQ, width), "float32"), ((SEQ // 2, width), "float32")}
    assert not shapes["psum"]
    assert not shapes["ppermute"]


def test_a_ring_sends_single_kv_heads_before_it_computes(context_placement, kernel_calls):
    found = traced_equations(gradients(context_placement, "ring"), jnp.bfloat16)
    sent = [equation.invars[0].aval for equation, _ in found if equation.primitive.name == "ppermute"]
    local = (BATCH, KV_HEADS, SEQ // CONTEXT, HEAD_DIM)
    assert {(x.shape, str(x.dtype)) for x in sent} == {
        (local, "bfloat16"),
        (local, "float32"),
        ((BATCH, SEQ // CONTEXT), "int32"),
    }
    # In the body of each loop over hops, nothing that is sent depends on the kernel of the same hop.
    bodies = [jaxpr for equation, jaxpr in found if str(equation.params.get("name")).endswith("_kernel")]
    assert len(bodies) == 2
    for body, sends in zip(bodies, (3, 5), strict=True):
        computed = set()
        for equation in body.eqns:
            inputs_of = {x for x in equation.invars if not hasattr(x, "val")}
            if equation.params.get("name") in kernel_calls or inputs_of & computed:
                assert equation.primitive.name != "ppermute"
                computed |= set(equation.outvars)
        assert computed
        assert sum(len(e.invars) for e in body.eqns if e.primitive.name == "ppermute") == sends


def test_other_values_and_equal_settings_are_not_traced_again(kernel_calls):
    run = jax.jit(attend, static_argnames=("placement", "config"))
    arrays = [jnp.ones(x.shape, x.dtype) for x in inputs()]
    for segment in (1, 2):
        mesh = make_mesh(context=CONTEXT, devices=jax.devices()[:CONTEXT])
        config = AttentionConfig("blockwise", "ring")
        run(*arrays[:3], arrays[3] * segment, arrays[4], placement=Placement(mesh), config=config)
    assert kernel_calls["forward_kernel"] == 1


def test_a_stack_of_layers_is_traced_once(context_placement, kernel_calls):
    def layers(q, k, v, segments, positions):
        def layer(x, _):
            return attention(context_placement)(x, k, v, segments, positions), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=SAVE_NAMED), q, length=36)[0])

    jax.make_jaxpr(layers)(*inputs())
    assert kernel_calls["forward_kernel"] == 1


def test_gather_is_chosen_until_whole_rows_exceed_the_budget():
    # 2 KV heads of width 128, bfloat16 K and V with float32 gradients: 2 * 128 * 2 * (2 + 4) = 3,072 bytes per token.
    assert gathered_bytes(1, 65_536, 2, 128, 2) == 65_536 * 3072
    assert GATHER_BUDGET_BYTES // 3072 == 349_525
    assert choose_strategy(1, 65_536, 2, 128, 2) == "gather"
    assert choose_strategy(1, 349_525, 2, 128, 2) == "gather"
    assert choose_strategy(1, 349_526, 2, 128, 2) == "ring"
    assert choose_strategy(6, 65_536, 2, 128, 2) == "ring"
    assert choose_strategy(1, 65_536, 2, 128, 2, budget_bytes=1 << 20) == "ring"


def test_auto_strategy_rings_a_row_beyond_the_budget(context_placement):
    length = 1 << 20
    q, k, v = (jax.ShapeDtypeStruct((1, length, h, 128), jnp.bfloat16) for h in (16, 2, 2))
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    run = functools.partial(attend, placement=context_placement, config=AttentionConfig("blockwise"))
    names = [e.primitive.name for e, _ in equations(jax.make_jaxpr(run)(q, k, v, tokens, tokens).jaxpr)]
    assert "ppermute" in names
    assert "all_gather" not in names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "flash"}, "attention backend is 'flash'; choose one of auto, dense, blockwise, pallas"),
        ({"strategy": "ulysses"}, "attention strategy is 'ulysses'; choose one of auto, gather, ring"),
        ({"block_q": -8}, "attention block_q is -8"),
        ({"block_kv": -1}, "attention block_kv is -1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        AttentionConfig(**settings)


def test_query_heads_that_do_not_form_groups_are_refused():
    q, k, _, *tokens = inputs()
    three = jax.ShapeDtypeStruct((BATCH, SEQ, 3, HEAD_DIM), k.dtype)
    with pytest.raises(UserError, match="8 query heads for 3 KV heads"):
        jax.eval_shape(functools.partial(attend, placement=UNPLACED), q, three, three, *tokens)
