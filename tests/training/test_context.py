"""A sharded sequence changes nothing: losses and gradients for every strategy, layout, remat policy and MLP split."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models.tiny import tiny_config
from tests.training.conftest import packed_batch
from vibethinker_jax.attention.attend import AttentionConfig
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import init_params, parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import UNPLACED, Placement
from vibethinker_jax.training.abstract import sft_batch as abstract_sft_batch
from vibethinker_jax.training.forward import PackedForward
from vibethinker_jax.training.mgpo_step import MgpoStep
from vibethinker_jax.training.optimizer import OptimizerConfig, make_optimizer
from vibethinker_jax.training.sft_step import sft_step

LENGTH = 48


@pytest.fixture(scope="module")
def config():
    return tiny_config(num_hidden_layers=2)


@pytest.fixture(scope="module")
def params(config):
    return init_params(config, seed=3)


@pytest.fixture(scope="module")
def batch(config):
    """Short documents with padding; then one document over the whole row; then one that starts inside a chunk."""
    batch = packed_batch(5, rows=2, sequence_length=LENGTH, vocab=config.vocab_size)
    rest = packed_batch(6, rows=2, sequence_length=LENGTH, vocab=config.vocab_size)
    rest["tokens"] = np.random.default_rng(7).integers(0, config.vocab_size, (2, LENGTH)).astype(np.int32)
    rest["targets"] = np.roll(rest["tokens"], -1, axis=1)
    rest["segment_ids"][:] = [[1] * LENGTH, [1] * 7 + [2] * (LENGTH - 7)]
    rest["positions"][:] = [range(LENGTH), [*range(7), *range(LENGTH - 7)]]
    rest["loss_weights"][:] = rest["positions"] > 2
    return {name: np.concatenate([batch[name], rest[name]]) for name in batch}


def gradient(config, params, batch, placement, **settings):
    settings = {"remat": "block", "mlp_chunks": 1, "attention": AttentionConfig(), "layout": "zigzag", **settings}
    forward = PackedForward(config, placement, jnp.float32, head_chunk=16, **settings)
    step = sft_step(forward, optax.sgd(1.0))
    if placement.mesh is not None:
        params = jax.device_put(params, parameter_shardings(config, placement))
    total = step.gradient(params, [batch])
    return jax.device_get(jax.tree.map(lambda x: x / total.denominator, (total.loss, total.gradient)))


@pytest.fixture(scope="module")
def expected(config, params, batch):
    return gradient(config, params, batch, UNPLACED, remat="none", attention=AttentionConfig(backend="dense"))


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[1], expected[1])


@pytest.mark.parametrize(
    ("context", "strategy", "layout"),
    list(itertools.product((4, 8), ("gather", "ring"), ("zigzag", "contiguous"))),
)
def test_loss_and_gradients_equal_one_device(config, params, batch, expected, context, strategy, layout):
    placement = Placement(make_mesh(context=context, fsdp=-1))
    found = gradient(
        config, params, batch, placement, attention=AttentionConfig("blockwise", strategy, 8, 8), layout=layout
    )
    assert_same(found, expected)


@pytest.mark.parametrize("remat", ["none", "full", "offload"])
def test_remat_policies_change_nothing(config, params, batch, expected, remat):
    assert_same(gradient(config, params, batch, Placement(make_mesh(context=4, fsdp=2)), remat=remat), expected)


def test_an_mlp_in_parts_changes_nothing(config, params, batch, expected):
    for placement in (UNPLACED, Placement(make_mesh(context=2, fsdp=2, tensor=2)), Placement(make_mesh(fsdp=-1))):
        rows = {name: np.concatenate([array, np.zeros_like(array)]) for name, array in batch.items()}
        assert_same(gradient(config, params, rows, placement, mlp_chunks=2), expected)


def test_an_mlp_that_does_not_divide_is_refused(config, params, batch):
    with pytest.raises(UserError, match=r"mlp_chunks is 7; choose a divisor of the MLP's width"):
        gradient(config, params, batch, UNPLACED, mlp_chunks=7)


def test_a_row_that_zigzag_cannot_cut_is_refused(config, params):
    odd = packed_batch(0, rows=2, sequence_length=44, vocab=config.vocab_size)
    with pytest.raises(UserError, match="44"):
        gradient(config, params, odd, Placement(make_mesh(context=4, fsdp=2)))


def test_log_probs_come_back_in_the_order_of_the_row(config, params, batch):
    scored = []
    for placement in (UNPLACED, Placement(make_mesh(context=4, fsdp=2))):
        step = MgpoStep(
            PackedForward(config, placement, jnp.float32, "block", head_chunk=16),
            optax.sgd(1.0),
            temperature=0.7,
            clip_low=0.2,
            clip_high=0.2,
            tis_cap=2.0,
            aggregation="sequence_mean",
        )
        placed = params if placement.mesh is None else jax.device_put(params, step.state_shardings.params)
        scored.append(step.log_probs(placed, batch))
    inside = batch["loss_weights"] > 0
    assert inside.any()
    np.testing.assert_allclose(scored[1][inside], scored[0][inside], atol=1e-5)


def step_with(config, params, placement, **changes):
    settings = OptimizerConfig(1e-3, 1e-3, 0.0, 0.9, 0.95, 1e-4, 0.1, 1.0)
    settings = dataclasses.replace(settings, **changes)
    optimizer, _ = make_optimizer(settings, config, total_steps=4)
    forward = PackedForward(config, placement, jnp.float32, "block", head_chunk=16)
    step = sft_step(forward, optimizer, offload=settings.offload)
    return step, step.init(jax.device_put(jax.tree.map(jnp.array, params), step.state_shardings.params))


def test_moments_in_host_memory_change_nothing(config, params, batch):
    placement = Placement(make_mesh(context=4, fsdp=2))
    step, state = step_with(config, params, placement)
    offloaded_step, offloaded = step_with(config, params, placement, offload=True)
    for batches in ([batch, batch], [batch]):
        state = step.update(state, step.gradient(state.params, batches))[0]
        offloaded, other = offloaded_step(offloaded, batches)
    assert other.summary()["update_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(offloaded))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded.opt_state) if leaf.ndim}
    assert kinds == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded.params)} == {"device"}


def test_moments_without_a_mesh_have_no_host_memory_to_go_to(config, params):
    with pytest.raises(UserError, match="offload needs a mesh"):
        step_with(config, params, UNPLACED, offload=True)


def test_the_first_moment_takes_the_configured_dtype(config, params, batch):
    step, state = step_with(config, params, Placement(make_mesh(context=4, fsdp=2)), moment_dtype="bfloat16")
    state, metrics = step(state, [batch])
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim}
    assert dtypes == {"bfloat16", "float32"}
    assert np.isfinite(metrics.summary()["update_norm"])
    with pytest.raises(UserError, match=r"optimizer\.moment_dtype is 'int8'; choose one of float32, bfloat16"):
        step_with(config, params, UNPLACED, moment_dtype="int8")


def test_a_step_lowers_without_data(config, params, batch):
    placement = Placement(make_mesh(context=4, fsdp=2))
    step, state = step_with(config, params, placement)
    abstract = abstract_sft_batch(rows=4, length=LENGTH)
    assert {k: (v.shape, v.dtype) for k, v in abstract.items()} == {k: (v.shape, v.dtype) for k, v in batch.items()}
    for lowered in (step.lower(abstract), *step.lower_accumulated(abstract).values()):
        assert lowered.compile().memory_analysis().argument_size_in_bytes > 0
    # What was lowered is what runs: the arguments of a real step fit it without moving.
    compiled = step.lower(abstract).compile()
    compiled(state, step.place(batch))
