"""Training checkpoints: optimizer states of any shape, meshes that change, steps that are whole or absent."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.checkpoints.tiny_hf import (
    BFLOAT16,
    SIDE_FILES,
    random_tensors,
    read_checkpoint,
    write_checkpoint,
)
from tests.models.tiny import tiny_raw
from vibethinker_jax.checkpoints.convert import orbax_to_hf
from vibethinker_jax.checkpoints.hf import HFCheckpoint
from vibethinker_jax.checkpoints.store import load_params, read_assets, save_model_directory
from vibethinker_jax.checkpoints.training_store import TrainingStore
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.parallel.mesh import make_mesh


def small_params(**axes: int) -> dict[str, Any]:
    mesh = make_mesh(**axes)
    random = np.random.default_rng(0)
    kernel = random.standard_normal((16, 6)).astype(np.float32)
    return {
        "dense": {"kernel": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))},
        "scale": jax.device_put(np.arange(6, dtype=np.float32), NamedSharding(mesh, PartitionSpec())),
    }


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "clipped, masked, scheduled": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)), {"dense": True, "scale": False}),
        optax.identity(),
    ),
    "sgd without state": optax.sgd(1e-2),
    "accumulating": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "bfloat16 moments": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
}


def trained(optimizer: optax.GradientTransformation, params: Any, steps: int) -> tuple[Any, Any]:
    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.tree.map(lambda p: jnp.sin(3 * p), params), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def assert_identical(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_optimizer_state_comes_back(tmp_path: pathlib.Path, name: str, asynchronous: bool) -> None:
    params, state = trained(OPTIMIZERS[name], small_params(fsdp=4, tensor=2), 3)
    metadata = {"step": 3, "row": 2**40, "rng": [1, 2], "note": "\N{SNOWMAN}", "nested": {"x": 0.1}}
    with TrainingStore(tmp_path, asynchronous=asynchronous) as store:
        store.save(3, params, state, metadata)
    with TrainingStore(tmp_path) as store:
        restored_params, restored_state, restored_metadata = store.restore(None, (params, state))
        assert store.read_metadata() == restored_metadata == metadata
    assert_identical(restored_params, params)
    assert_identical(restored_state, state)
    assert restored_params["dense"]["kernel"].sharding == params["dense"]["kernel"].sharding


def test_a_run_that_resumes_continues_bit_for_bit(tmp_path: pathlib.Path) -> None:
    optimizer = OPTIMIZERS["clipped, masked, scheduled"]
    begin = small_params(fsdp=4, tensor=2)
    whole = trained(optimizer, begin, 2)
    with TrainingStore(tmp_path) as store:
        store.save(2, *whole, {})
        params, state, _ = store.restore(2, whole)
    update = jax.jit(lambda p, s: optimizer.update(p, s, p))
    assert_identical(update(params, state), update(*whole))


def test_a_run_moves_to_another_mesh(tmp_path: pathlib.Path) -> None:
    params, state = trained(OPTIMIZERS["adamw"], small_params(fsdp=4, tensor=2), 1)
    other = trained(OPTIMIZERS["adamw"], small_params(replica=2, fsdp=2, tensor=2), 0)
    with TrainingStore(tmp_path) as store:
        store.save(1, params, state, {})
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other)
        restored_params, restored_state, _ = store.restore(1, abstract)
    assert_identical(restored_params, params)
    assert_identical(restored_state, state)
    assert restored_params["dense"]["kernel"].sharding == other[0]["dense"]["kernel"].sharding


def test_arrays_may_be_donated_while_they_are_being_written(tmp_path: pathlib.Path) -> None:
    params = {f"{i}": jnp.full((512, 1024), i, jnp.float32) for i in range(8)}
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    with TrainingStore(tmp_path) as store:
        store.save(1, params, {"count": jnp.int32(1)}, {})
        params = jax.block_until_ready(spoil(params))
        store.wait()
        restored, _, _ = store.restore(1, (params, {"count": jnp.int32(0)}))
    for i in range(8):
        np.testing.assert_array_equal(restored[f"{i}"], i)


def test_only_the_newest_steps_stay(tmp_path: pathlib.Path) -> None:
    params = small_params(fsdp=8)
    with TrainingStore(tmp_path, keep=2) as store:
        assert store.latest_step() is None
        for step in (5, 6, 9, 12):
            store.save(step, params, {"count": jnp.int32(step)}, {"step": step})
        store.wait()
        assert store.all_steps() == [9, 12]
        assert store.latest_step() == 12
        _, state, metadata = store.restore(9, (params, {"count": jnp.int32(0)}))
        assert (int(state["count"]), metadata) == (9, {"step": 9})
        with pytest.raises(UserError, match="step 12 exists already"):
            store.save(12, params, {}, {})
        with pytest.raises(UserError, match="does not have step 7; choose one of 9, 12"):
            store.restore(7, (params, {"count": jnp.int32(0)}))


def test_a_run_without_steps_says_so(tmp_path: pathlib.Path) -> None:
    with TrainingStore(tmp_path) as store, pytest.raises(UserError, match="does not have any step; start the run"):
        store.restore(None, ({}, {}))


def test_a_different_model_or_optimizer_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    params, state = trained(OPTIMIZERS["adamw"], small_params(fsdp=8), 1)
    with TrainingStore(tmp_path) as store:
        store.save(1, params, state, {})
        wider = {**params, "scale": jnp.zeros(7)}
        with pytest.raises(UserError, match=r"params scale is float32\[6\], the run expects float32\[7\]"):
            store.restore(1, (wider, state))
        half = {**params, "scale": params["scale"].astype(jnp.bfloat16)}
        with pytest.raises(UserError, match=r"params scale is float32\[6\], the run expects bfloat16\[6\]"):
            store.restore(1, (half, state))
        with pytest.raises(UserError, match="params extra is absent"):
            store.restore(1, ({**params, "extra": jnp.zeros(2)}, state))
        with pytest.raises(UserError, match=r"opt_state has .*mu/dense/kernel"):
            store.restore(1, (params, OPTIMIZERS["sgd without state"].init(params)))


def test_a_flipped_bit_in_the_optimizer_state_is_noticed(tmp_path: pathlib.Path) -> None:
    params = small_params(fsdp=8)
    state = {"moment": jnp.asarray(np.random.default_rng(1).standard_normal((300, 500)).astype(np.float32))}
    with TrainingStore(tmp_path) as store:
        store.save(4, params, state, {})
    directory = tmp_path / "checkpoints" / "4" / "opt_state"
    data = max(directory.glob("**/d/*"), key=lambda path: path.stat().st_size)
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 1
    data.write_bytes(contents)
    with (
        TrainingStore(tmp_path) as store,
        pytest.raises(UserError, match=r"4: opt_state moment is damaged \(checksum\)"),
    ):
        store.restore(4, (params, state))


@pytest.fixture
def run(tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[int, Any]]:
    """A working directory with steps 10 and 20 of a model in float32, and what each held."""
    raw = tiny_raw(torch_dtype="bfloat16")
    tensors = random_tensors(raw, BFLOAT16, seed=0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = write_checkpoint(tmp_path / "source", tensors, raw)
    workdir = tmp_path / "run"
    save_model_directory(HFCheckpoint(source).config, read_assets(source), workdir)
    params, saved = load_params(source, dtype="float32"), {}
    with TrainingStore(workdir) as store:
        for step in (10, 20):
            params = jax.tree.map(lambda x: x * jnp.float32(1.01), params)
            store.save(step, params, optax.adam(1e-3).init(params), {"step": step})
            saved[step] = params
    return workdir, saved


def test_parameters_of_a_run_load_alone(run: tuple[pathlib.Path, dict[int, Any]]) -> None:
    workdir, saved = run
    assert_identical(load_params(workdir), saved[20])
    assert_identical(load_params(workdir, step=10), saved[10])
    half = load_params(workdir, dtype="bfloat16", step=10)
    np.testing.assert_array_equal(half["norm"]["scale"], saved[10]["norm"]["scale"].astype(jnp.bfloat16))
    with pytest.raises(UserError, match="has no step 15; choose one of 10, 20"):
        load_params(workdir, step=15)


def test_a_run_becomes_a_hugging_face_checkpoint(
    tmp_path: pathlib.Path, run: tuple[pathlib.Path, dict[int, Any]]
) -> None:
    workdir, saved = run
    orbax_to_hf(workdir, tmp_path / "newest")
    orbax_to_hf(workdir, tmp_path / "first", step=10, dtype="bfloat16")
    newest, first = read_checkpoint(tmp_path / "newest"), read_checkpoint(tmp_path / "first")
    np.testing.assert_array_equal(newest["model.norm.weight"], saved[20]["norm"]["scale"])
    np.testing.assert_array_equal(newest["lm_head.weight"], saved[20]["embed"]["table"][:97])
    np.testing.assert_array_equal(
        newest["model.layers.2.mlp.down_proj.weight"].T, saved[20]["layers"]["mlp"]["down"]["kernel"][2]
    )
    assert {tensor.dtype for tensor in newest.values()} == {np.dtype(np.float32)}
    assert {tensor.dtype for tensor in first.values()} == {BFLOAT16}
    # Master weights are float32 whatever the model began as, and config.json says what is there.
    raw = tiny_raw(torch_dtype="bfloat16")
    assert json.loads((tmp_path / "newest" / "config.json").read_text()) == {**raw, "torch_dtype": "float32"}
    assert json.loads((tmp_path / "first" / "config.json").read_text()) == raw
    assert (tmp_path / "newest" / "tokenizer.json").read_bytes() == SIDE_FILES["tokenizer.json"]


def test_a_run_before_its_first_checkpoint_says_so(tmp_path: pathlib.Path) -> None:
    config = Qwen2Config.from_hf(tiny_raw(), source="tiny")
    source = write_checkpoint(tmp_path / "source", random_tensors(tiny_raw(), BFLOAT16, seed=1))
    save_model_directory(config, read_assets(source), tmp_path / "run")
    with TrainingStore(tmp_path / "run"):
        pass
    with pytest.raises(UserError, match="has no complete step yet"):
        load_params(tmp_path / "run")


def test_a_working_directory_belongs_to_one_model(tmp_path: pathlib.Path) -> None:
    source = write_checkpoint(tmp_path / "source", random_tensors(tiny_raw(), BFLOAT16, seed=1))
    config, assets = HFCheckpoint(source).config, read_assets(source)
    save_model_directory(config, assets, tmp_path / "run")
    save_model_directory(config, assets, tmp_path / "run")  # as a run that resumes does
    other = Qwen2Config.from_hf(tiny_raw(num_hidden_layers=4), source="other")
    with pytest.raises(UserError, match=r"num_layers=3.*this run has.*num_layers=4"):
        save_model_directory(other, assets, tmp_path / "run")
