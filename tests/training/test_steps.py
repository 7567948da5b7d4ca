"""SFT and MGPO steps: any mesh, any cut into micro-batches, one result."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.training.conftest import packed_batch
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import parameter_shardings
from vibethinker_jax.models.qwen2 import build
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import UNPLACED, Placement
from vibethinker_jax.training.forward import PackedForward
from vibethinker_jax.training.mgpo_step import MgpoStep
from vibethinker_jax.training.optimizer import OptimizerConfig, make_optimizer
from vibethinker_jax.training.sft_step import sft_step

LEARNING_RATE = 1e-3
OPTIMIZER = OptimizerConfig(
    # eps is raised above the rounding of gradients: Adam's first step is g / (|g| + eps), which turns a gradient that
    # is zero up to rounding into +-1.
    peak=LEARNING_RATE,
    floor=LEARNING_RATE,
    warmup_fraction=0.0,
    b1=0.9,
    b2=0.95,
    eps=1e-4,
    weight_decay=0.1,
    clip_norm=1.0,
)
MESHES = [
    {"fsdp": 8},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"replica": 2, "fsdp": 4},
    {"context": 4, "tensor": 2},
]


def make_sft(config, placement=UNPLACED):
    optimizer, _ = make_optimizer(OPTIMIZER, config, total_steps=10)
    return sft_step(PackedForward(config, placement, jnp.float32, "none", head_chunk=8), optimizer)


def make_mgpo(config, placement=UNPLACED):
    optimizer, _ = make_optimizer(OPTIMIZER, config, total_steps=10)
    return MgpoStep(
        PackedForward(config, placement, jnp.float32, "full", head_chunk=8),
        optimizer,
        temperature=0.8,
        clip_low=0.2,
        clip_high=0.2,
        tis_cap=2.0,
        aggregation="sequence_mean",
    )


def copied(params):
    """A step consumes its state, so each gets its own."""
    return jax.tree.map(jnp.array, params)


def reference_log_probs(config, params, batch, temperature):
    """Dense log-softmax of every target, whole row at once, with plain autodiff."""
    model = build(config, params)
    hidden = model(jnp.asarray(batch["tokens"]), jnp.asarray(batch["positions"]), jnp.asarray(batch["segment_ids"]))
    logits = model.logits(hidden)[..., : config.vocab_size] / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch["targets"])[..., None], axis=-1)[..., 0]


def reference_sft(config, params, batch):
    weights = batch["loss_weights"]
    return -jnp.sum(reference_log_probs(config, params, batch, 1.0) * weights) / weights.sum()


def reference_mgpo(config, params, batch):
    """R3 eq. 3 with token TIS, response by response, as the report writes it."""
    log_probs = reference_log_probs(config, params, batch, 0.8)
    total = 0.0
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            finite = np.isfinite(batch["rollout_log_probs"][row])
            here = np.flatnonzero((batch["segment_ids"][row] == segment) & (batch["loss_weights"][row] > 0) & finite)
            if not len(here):
                continue
            ratio = jnp.exp(log_probs[row, here] - batch["old_log_probs"][row, here])
            tis = np.minimum(np.exp(batch["old_log_probs"][row, here] - batch["rollout_log_probs"][row, here]), 2.0)
            advantage = batch["advantages"][row, segment - 1]
            terms = tis * jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            total += batch["sequence_weights"][row, segment - 1] * jnp.mean(terms)
    return -total / batch["num_groups"]


KINDS = {"sft": (make_sft, reference_sft), "mgpo": (make_mgpo, reference_mgpo)}


@pytest.fixture(params=["sft", "mgpo"])
def kind(request, sft_batch, mgpo_batch):
    make, reference = KINDS[request.param]
    return make, reference, sft_batch if request.param == "sft" else mgpo_batch


def divided(total):
    return total.loss / total.denominator, jax.tree.map(lambda g: g / total.denominator, total.gradient)


@pytest.fixture(scope="module")
def unsharded(tiny, sft_batch, mgpo_batch):
    """Per kind: reference loss and gradient, and parameters after one step without a mesh."""
    config, params = tiny
    results = {}
    for name, (make, reference) in KINDS.items():
        batch = sft_batch if name == "sft" else mgpo_batch
        expected = jax.jit(jax.value_and_grad(lambda p, f=reference, b=batch: f(config, p, b)))(params)
        step = make(config)
        state, _ = step(step.init(copied(params)), [batch])
        results[make] = (*expected, state.params)
    return results


def assert_trees_close(actual, expected, rtol, scale_free=True):
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        # Elements far below a leaf's largest are sums that cancel: compare them at the leaf's own scale.
        atol = rtol * float(jnp.max(jnp.abs(e))) if scale_free else 0.0
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_loss_and_gradient_equal_the_dense_reference(tiny, kind, unsharded):
    make, _, batch = kind
    loss, gradient = divided(make(tiny[0]).gradient(tiny[1], [batch]))
    np.testing.assert_allclose(loss, unsharded[make][0], rtol=1e-5)
    assert_trees_close(gradient, unsharded[make][1], rtol=2e-5)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_equals_unsharded(tiny, kind, unsharded, axes):
    (config, params), (make, _, batch) = tiny, kind
    placement = Placement(make_mesh(**axes))
    step = make(config, placement)
    placed = jax.device_put(copied(params), parameter_shardings(config, placement))
    total = step.gradient(placed, [batch])
    loss, gradient = divided(total)
    np.testing.assert_allclose(loss, unsharded[make][0], rtol=1e-5)
    assert_trees_close(gradient, unsharded[make][1], rtol=2e-5)
    state, _ = step.update(step.init(placed), total)
    for updated, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(unsharded[make][2]), strict=True):
        np.testing.assert_allclose(updated, expected, rtol=0, atol=0.01 * LEARNING_RATE)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 4]
    assert moments
    assert all(m.sharding.shard_shape(m.shape) != m.shape for m in moments)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_micro_batches_of_unequal_lengths_equal_one_big_batch(tiny, kind, unsharded, pieces):
    (config, params), (make, _, batch) = tiny, kind
    cuts = [{name: a if a.ndim == 0 else np.split(a, pieces)[i] for name, a in batch.items()} for i in range(pieces)]
    for i, cut in enumerate(cuts):
        if "num_groups" in cut:
            cut["num_groups"] = np.float32(4 if i == 0 else 0)
    assert len({float(cut["loss_weights"].sum()) for cut in cuts}) > 1
    step = make(config)
    loss, gradient = divided(step.gradient(params, cuts))
    np.testing.assert_allclose(loss, unsharded[make][0], rtol=1e-5)
    assert_trees_close(gradient, unsharded[make][1], rtol=2e-5)
    state, metrics = step(step.init(copied(params)), cuts)
    np.testing.assert_allclose(metrics.summary()["loss"], unsharded[make][0], rtol=1e-5)
    for updated, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(unsharded[make][2]), strict=True):
        np.testing.assert_allclose(updated, expected, rtol=0, atol=0.01 * LEARNING_RATE)


def test_the_number_of_micro_batches_never_recompiles(tiny, sft_batch):
    config, params = tiny
    step = make_sft(config)
    state = step.init(copied(params))
    cuts = [{name: np.split(a, 8)[i] for name, a in sft_batch.items()} for i in range(8)]
    for count in (2, 5, 8, 3):
        state, _ = step(state, cuts[:count])
    assert step._first._cache_size() == step._add._cache_size() == step._update._cache_size() == 1


def test_rows_of_padding_change_nothing(tiny, kind, unsharded):
    (config, params), (make, _, batch) = tiny, kind
    padding = {name: a if a.ndim == 0 else np.zeros_like(a) for name, a in batch.items()}
    if "num_groups" in padding:
        padding["num_groups"] = np.float32(0)
    loss, gradient = divided(make(config).gradient(params, [batch, padding]))
    np.testing.assert_allclose(loss, unsharded[make][0], rtol=1e-5)
    assert_trees_close(gradient, unsharded[make][1], rtol=2e-5)


def test_a_batch_without_anything_to_train_leaves_finite_parameters(tiny, sft_batch):
    config, params = tiny
    step = make_sft(config)
    state, metrics = step(step.init(copied(params)), [{**sft_batch, "loss_weights": 0 * sft_batch["loss_weights"]}])
    assert metrics.summary()["gradient_norm"] == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_an_on_policy_update_needs_no_old_log_probs(tiny, mgpo_batch):
    config, params = tiny
    step = make_mgpo(config)
    explicit = {**mgpo_batch, "old_log_probs": np.asarray(step.log_probs(params, mgpo_batch))}
    implicit = {name: a for name, a in mgpo_batch.items() if name != "old_log_probs"}
    expected = step.gradient(params, [explicit])
    actual = step.gradient(params, [implicit])
    assert_trees_close(actual.gradient, expected.gradient, rtol=1e-5)
    assert actual.metrics.summary()["policy/ratio"] == 1.0
    np.testing.assert_allclose(expected.metrics.summary()["policy/ratio"], 1.0, atol=1e-6)
    np.testing.assert_allclose(
        actual.metrics.summary()["mismatch/k3"], expected.metrics.summary()["mismatch/k3"], rtol=1e-4
    )


def test_old_log_probs_are_those_of_the_sampling_temperature(tiny, mgpo_batch):
    config, params = tiny
    expected = reference_log_probs(config, params, mgpo_batch, 0.8)
    counted = mgpo_batch["loss_weights"] > 0
    actual = np.asarray(make_mgpo(config).log_probs(params, mgpo_batch))
    np.testing.assert_allclose(actual[counted], np.asarray(expected)[counted], atol=2e-5)


def test_weight_decay_spares_norms_and_biases(tiny, sft_batch):
    config, params = tiny
    step = make_sft(config)
    nothing = {**sft_batch, "loss_weights": 0 * sft_batch["loss_weights"]}
    state, _ = step(step.init(copied(params)), [nothing])
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(state.params), strict=True
    ):
        decays = path[-1].key in ("kernel", "table")
        factor = 1 - LEARNING_RATE * OPTIMIZER.weight_decay if decays else 1
        np.testing.assert_allclose(after, before * factor, rtol=1e-6)


def test_the_gradient_is_clipped_by_its_global_norm(tiny, sft_batch):
    config, params = tiny
    plain = optax.sgd(1.0)
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), plain)
    forward = PackedForward(config, UNPLACED, jnp.float32, "none", head_chunk=8)
    steps = [sft_step(forward, optimizer) for optimizer in (plain, clipped)]
    (free, metrics), (bound, _) = (step(step.init(copied(params)), [sft_batch]) for step in steps)
    norm = metrics.summary()["gradient_norm"]
    assert norm > 1e-3
    change = jax.tree.map(lambda a, b: a - b, free.params, params)
    expected = jax.tree.map(lambda p, c: p + c * 1e-3 / norm, params, change)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), bound.params, expected)


def test_a_mesh_that_does_not_divide_the_batch_is_refused(tiny):
    config, params = tiny
    placement = Placement(make_mesh(fsdp=2, context=4))
    step = make_sft(config, placement)
    placed = jax.device_put(copied(params), parameter_shardings(config, placement))
    with pytest.raises(UserError, match="micro_batch_rows is 3; make it a multiple of mesh replica x fsdp = 2"):
        step.gradient(placed, [packed_batch(0, 3, 24, 97)])
    with pytest.raises(UserError, match="sequence_length is 22; make it a multiple of mesh context = 4"):
        step.gradient(placed, [packed_batch(0, 4, 22, 97)])
