"""The decoder against transformers, and against itself on packed, cached and sharded paths."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import tiny_config, tiny_raw
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import abstract_params, init_params, parameter_shardings
from vibethinker_jax.models.qwen2 import build, get_params, init_cache
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement


@functools.partial(jax.jit, static_argnums=0, static_argnames="remat")
def forward(config, params, tokens, positions=None, segment_ids=None, remat="none"):
    return build(config, params, remat=remat)(tokens, positions, segment_ids)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens, positions=None, segment_ids=None):
    model = build(config, params)
    return model.logits(model(tokens, positions, segment_ids))


@functools.partial(jax.jit, static_argnums=0)
def extend(config, params, tokens, cache, start):
    return build(config, params).extend(tokens, cache, start)


def random_tokens(seed, batch, length, config):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocab_size)


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    params = init_params(config, seed=0)

    # Biases and norms start neutral; give them values, or a missing one would not show.
    def noise(path, x):
        return x + 0.3 * jax.random.normal(jax.random.key(len(str(path))), x.shape)

    return config, jax.tree_util.tree_map_with_path(
        lambda path, x: noise(path, x) if path[-1].key in ("bias", "scale") else x, params
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)], ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_equal_transformers(tmp_path, heads, tied):
    torch = pytest.importorskip("torch", reason="PyTorch is in the test extra")
    transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
    from vibethinker_jax.checkpoints.hf import HFCheckpoint, read_parameters

    raw = tiny_raw(num_attention_heads=heads[0], num_key_value_heads=heads[1], hidden_size=64, tie_word_embeddings=tied)
    torch.manual_seed(0)
    reference = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**raw)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path)
    config = Qwen2Config.from_hf(json.loads((tmp_path / "config.json").read_text()), "saved by transformers")
    params = read_parameters(HFCheckpoint(tmp_path), parameter_shardings(config, Placement(None)), "float32")
    for length in (1, 7, 613):
        tokens = np.array(random_tokens(length, 2, length, config))
        with torch.no_grad():
            expected = reference(torch.tensor(tokens)).logits.numpy()
        actual = np.asarray(logits(config, params, tokens))
        assert np.all(np.isneginf(actual[..., config.vocab_size :]))
        np.testing.assert_allclose(actual[..., : config.vocab_size], expected, atol=2e-4, rtol=0)


def test_packed_documents_equal_separate_ones(model):
    config, params = model
    lengths, row = (5, 1, 17, 9), 40
    documents = [random_tokens(i, 1, n, config) for i, n in enumerate(lengths)]
    pad = row - sum(lengths)
    tokens = jnp.pad(jnp.concatenate(documents, axis=1), ((0, 0), (0, pad)), constant_values=3)
    segments = np.repeat(np.arange(1, 6), (*lengths, pad))[None] % 5
    positions = np.concatenate([np.arange(n) for n in (*lengths, pad)])[None]
    packed = np.asarray(forward(config, params, tokens, positions, segments))
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        alone = np.asarray(forward(config, params, document))
        np.testing.assert_allclose(packed[:, start : start + length], alone, atol=2e-5)
        start += length
    assert np.isfinite(packed).all()


def test_later_tokens_and_other_documents_leave_outputs_bit_identical(model):
    config, params = model
    tokens = random_tokens(3, 2, 40, config)
    segments = np.broadcast_to(np.repeat([1, 2, 3, 0], (11, 13, 10, 6)), (2, 40))
    positions = np.broadcast_to(np.concatenate([np.arange(n) for n in (11, 13, 10, 6)]), (2, 40))
    before = np.asarray(forward(config, params, tokens, positions, segments))
    for changed in (0, 10, 11, 20, 23, 30, 39):
        after = np.asarray(forward(config, params, tokens.at[:, changed].add(1) % 97, positions, segments))
        same_document = segments[0] == segments[0, changed]
        may_differ = same_document & (positions[0] >= positions[0, changed])
        np.testing.assert_array_equal(before[:, ~may_differ], after[:, ~may_differ])
        if segments[0, changed]:
            assert np.any(before[:, may_differ] != after[:, may_differ])


def test_the_cache_gives_what_the_whole_sequence_gives(model):
    config, params = model
    tokens = random_tokens(4, 3, 29, config)
    whole = np.asarray(forward(config, params, tokens))
    # Prefill in chunks of 8 whose last one is part padding, at a different length per row; then decode.
    prompt = np.array([16, 9, 23])
    cache = init_cache(config, 3, 32, jnp.float32)
    outputs = np.zeros_like(whole)
    for start in (0, 8, 16):
        chunk = np.where(start + np.arange(8)[None] < prompt[:, None], tokens[:, start : start + 8], 96)
        hidden, cache = extend(config, params, chunk, cache, np.full(3, start, np.int32))
        outputs[:, start : start + 8] = hidden
    for offset in range(6):
        now = prompt + offset
        hidden, cache = extend(config, params, tokens[np.arange(3), now][:, None], cache, now.astype(np.int32))
        outputs[np.arange(3), now] = hidden[:, 0]
    for row in range(3):
        np.testing.assert_allclose(outputs[row, : prompt[row] + 6], whole[row, : prompt[row] + 6], atol=2e-5)


def test_remat_changes_neither_loss_nor_gradient(model):
    config, params = model
    tokens = random_tokens(5, 2, 12, config)

    def loss(params, remat):
        return jnp.sum(forward(config, params, tokens, remat=remat) ** 2)

    plain = jax.value_and_grad(loss)(params, "none")
    saved = jax.value_and_grad(loss)(params, "full")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, saved)
    with pytest.raises(UserError, match="remat policy is 'everything'"):
        build(config, params, remat="everything")


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 8},
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"replica": 2, "fsdp": 4},
        {"context": 4, "tensor": 2},
    ],
    ids=str,
)
def test_sharded_outputs_equal_unsharded(model, axes):
    config, params = model
    placement = Placement(make_mesh(**axes))
    tokens = random_tokens(6, 8, 16, config)
    segments = np.broadcast_to(np.repeat([1, 2, 0], (9, 5, 2)), (8, 16))
    positions = np.broadcast_to(np.concatenate([np.arange(9), np.arange(5), np.arange(2)]), (8, 16))
    expected = forward(config, params, tokens, positions, segments)
    placed = jax.device_put(params, parameter_shardings(config, placement))
    run = jax.jit(lambda p, *args: build(config, p, placement)(*args))
    actual = run(placed, tokens, positions, segments)
    sizes = placement.size("replica", "fsdp"), placement.size("context")
    assert actual.sharding.shard_shape(actual.shape) == (8 // sizes[0], 16 // sizes[1], 48)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_the_parameter_tree_is_the_module_tree_and_seeds_are_mesh_independent(model):
    config, params = model
    assert jax.tree.structure(get_params(build(config, params))) == jax.tree.structure(params)
    shapes = jax.tree.map(lambda x: x.shape, params)
    assert shapes == jax.tree.map(lambda x: x.shape, abstract_params(config))
    first = init_params(config, 7)
    sharded = init_params(config, 7, Placement(make_mesh(fsdp=2, context=2, tensor=2)))
    jax.tree.map(np.testing.assert_array_equal, first, sharded)
    assert np.any(first["embed"]["table"] != init_params(config, 8)["embed"]["table"])
    np.testing.assert_array_equal(first["embed"]["table"][97:], 0)


def test_bfloat16_compute_keeps_float32_logits(model):
    config, params = model
    tokens = random_tokens(8, 2, 10, config)
    narrow = build(config, params, compute_dtype=jnp.bfloat16)
    hidden = narrow(tokens)
    assert hidden.dtype == jnp.bfloat16
    out = narrow.logits(hidden)
    assert out.dtype == jnp.float32
    # float32 accumulation: the logits hold values that bfloat16 cannot.
    finite = np.asarray(out[..., :97])
    assert np.any(finite != np.asarray(jnp.asarray(finite).astype(jnp.bfloat16).astype(jnp.float32)))
    np.testing.assert_allclose(finite, logits(config, params, tokens)[..., :97], atol=0.15)
