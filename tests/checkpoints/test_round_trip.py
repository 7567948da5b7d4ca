"""Hugging Face -> policy checkpoint -> Hugging Face gives back every byte; side files and config.json too."""

import json
import pathlib
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints.tiny_hf import (
    BFLOAT16,
    SIDE_FILES,
    assert_same_bytes,
    random_tensors,
    read_checkpoint,
    write_checkpoint,
)
from tests.models.tiny import tiny_raw
from vibethinker_jax.checkpoints.assets import Assets
from vibethinker_jax.checkpoints.convert import hf_to_orbax, orbax_to_hf
from vibethinker_jax.checkpoints.export import write_hf
from vibethinker_jax.checkpoints.hf import HFCheckpoint, read_parameters
from vibethinker_jax.checkpoints.store import load_params, read_assets, save_policy
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement

torch = pytest.importorskip("torch", reason="the oracle; it is in the test extra on Python 3.11")
transformers = pytest.importorskip("transformers", reason="the oracle; it is in the test extra on Python 3.11")


def convert_both_ways(source: pathlib.Path, tmp_path: pathlib.Path, **kwargs: Any) -> pathlib.Path:
    hf_to_orbax(source, tmp_path / "policy")
    orbax_to_hf(tmp_path / "policy", tmp_path / "back", **kwargs)
    return tmp_path / "back"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)])
@pytest.mark.parametrize("shards", [1, 3])
def test_any_bit_pattern_comes_back(tmp_path: pathlib.Path, tied: bool, dtype: np.dtype, shards: int) -> None:
    raw = tiny_raw(tie_word_embeddings=tied)
    tensors = random_tensors(raw, dtype, seed=0, any_bits=True)
    source = write_checkpoint(tmp_path / "source", tensors, raw, shards)
    back = convert_both_ways(source, tmp_path, max_shard_bytes=30_000)
    assert len(list(back.glob("model-*.safetensors"))) > 1
    assert_same_bytes(read_checkpoint(back), tensors)
    for name in [*SIDE_FILES, "config.json"]:
        for directory in (tmp_path / "policy", back):
            assert (directory / name).read_bytes() == (source / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "policy", "back"}


def norms_in_float32(name: str) -> np.dtype:
    return np.dtype(np.float32) if "norm" in name else BFLOAT16


def one_layer_in_float16(name: str) -> np.dtype:
    return np.dtype(np.float16) if ".layers.1." in name else BFLOAT16


def head_in_float32(name: str) -> np.dtype:
    return np.dtype(np.float32) if name == "lm_head.weight" else np.dtype(np.float16)


def every_other_tensor(name: str) -> np.dtype:
    return [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16][sum(name.encode()) % 3]


@pytest.mark.parametrize("dtype", [norms_in_float32, one_layer_in_float16, head_in_float32, every_other_tensor])
def test_mixed_dtypes_come_back(tmp_path: pathlib.Path, dtype: Any) -> None:
    raw = tiny_raw(tie_word_embeddings=False)
    tensors = random_tensors(raw, dtype, seed=1)
    assert len({tensor.dtype for tensor in tensors.values()}) > 1
    back = convert_both_ways(write_checkpoint(tmp_path / "source", tensors, raw, shards=3), tmp_path)
    assert_same_bytes(read_checkpoint(back), tensors)


def test_a_nan_that_stacking_would_change_is_refused(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), one_layer_in_float16, seed=2)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][0, 0] = np.array([0x7F81], np.uint16).view(BFLOAT16)[0]
    with pytest.raises(UserError, match=f"{name}: has values that float32 cannot hold exactly"):
        hf_to_orbax(write_checkpoint(tmp_path / "source", tensors), tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("vocab", [97, 128, 129])
def test_padding_of_the_vocabulary_does_not_get_out(tmp_path: pathlib.Path, vocab: int) -> None:
    raw = tiny_raw(vocab_size=vocab, tie_word_embeddings=False)
    tensors = random_tensors(raw, BFLOAT16, seed=3)
    hf_to_orbax(write_checkpoint(tmp_path / "source", tensors, raw), tmp_path / "policy")
    params = load_params(tmp_path / "policy")
    padded = {97: 128, 128: 128, 129: 256}[vocab]
    for table in (params["embed"]["table"], params["lm_head"]["table"]):
        assert table.shape == (padded, 48)
        assert not table[vocab:].any()
    dirty = jax.tree.map(lambda leaf: leaf.at[vocab:].set(1) if leaf.shape[0] == padded else leaf, params)
    config = Qwen2Config.from_file(tmp_path / "source" / "config.json")
    write_hf(dirty, config, Assets(), tmp_path / "back")
    assert_same_bytes(read_checkpoint(tmp_path / "back"), tensors)


def test_a_redundant_head_survives(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), BFLOAT16, seed=4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    source = write_checkpoint(tmp_path / "source", tensors, shards=3)
    assert HFCheckpoint(source).redundant_head
    assert "lm_head" not in read_parameters(HFCheckpoint(source))
    back = convert_both_ways(source, tmp_path)
    assert_same_bytes(read_checkpoint(back), tensors)
    # ... and a path that goes through memory.
    assets = read_assets(source)
    write_hf(load_params(source), HFCheckpoint(source).config, assets, tmp_path / "written")
    assert_same_bytes(read_checkpoint(tmp_path / "written"), tensors)


def test_a_head_that_differs_in_the_sign_of_a_zero_is_no_redundant_head(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), BFLOAT16, seed=5)
    tensors["model.embed_tokens.weight"][3, 4] = 0.0
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][3, 4] = -0.0
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        HFCheckpoint(write_checkpoint(tmp_path / "source", tensors))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        HFCheckpoint(write_checkpoint(tmp_path / "wider", tensors))


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_converting_the_dtype_rounds_and_changes_one_field(tmp_path: pathlib.Path, direction: str, field: str) -> None:
    raw = tiny_raw(unusual={"kept": [1, 2.5, "\N{SNOWMAN}"]})
    del raw["torch_dtype"]
    raw[field] = "float32"
    tensors = random_tensors(raw, np.float32, seed=6)
    source = write_checkpoint(tmp_path / "source", tensors, raw)
    with pytest.warns(UserWarning, match="unusual"):
        hf_to_orbax(source, tmp_path / "policy", dtype="bfloat16" if direction == "in" else None)
    with pytest.warns(UserWarning, match="unusual"):
        orbax_to_hf(tmp_path / "policy", tmp_path / "back", dtype="bfloat16" if direction == "out" else None)
    converted = read_checkpoint(tmp_path / "back")
    for name, tensor in tensors.items():
        expected = torch.from_numpy(tensor).to(torch.bfloat16).view(torch.int16).numpy()
        assert converted[name].dtype == BFLOAT16
        np.testing.assert_array_equal(converted[name].view(np.int16), expected)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written == {**raw, field: "bfloat16"}
    assert list(written) == list(raw)


def test_a_dtype_that_is_too_small_leaves_nothing(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), np.float32, seed=7)
    tensors["model.norm.weight"][5] = 1e6
    hf_to_orbax(write_checkpoint(tmp_path / "source", tensors), tmp_path / "policy")
    with pytest.raises(UserError, match=r"model\.norm\.weight: holds 1e\+06, too large for float16"):
        orbax_to_hf(tmp_path / "policy", tmp_path / "back", dtype="float16")
    assert not (tmp_path / "back").exists()
    with pytest.raises(UserError, match="norm/scale: holds values too large for float16"):
        load_params(tmp_path / "policy", dtype="float16")


def test_a_changed_configuration_changes_only_its_fields(tmp_path: pathlib.Path) -> None:
    raw = tiny_raw()
    source = write_checkpoint(tmp_path / "source", random_tensors(raw, np.float32, seed=8), raw)
    longer = Qwen2Config.from_hf({**raw, "max_position_embeddings": 65536}, source="longer")
    write_hf(load_params(source), longer, Assets.read(source), tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written == {**raw, "max_position_embeddings": 65536}
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == SIDE_FILES["tokenizer.json"]


def test_parameters_of_another_dtype_are_declared(tmp_path: pathlib.Path) -> None:
    raw = tiny_raw(torch_dtype="bfloat16")
    source = write_checkpoint(tmp_path / "source", random_tensors(raw, BFLOAT16, seed=9), raw)
    params, assets = load_params(source, dtype="float32"), read_assets(source)
    config = HFCheckpoint(source).config
    write_hf(params, config, assets, tmp_path / "hf")
    save_policy(params, config, assets, tmp_path / "policy")
    for directory in ("hf", "policy"):
        assert json.loads((tmp_path / directory / "config.json").read_text()) == {**raw, "torch_dtype": "float32"}


@pytest.mark.parametrize("tied", [True, False])
def test_exports_from_a_mesh_are_those_from_one_device(tmp_path: pathlib.Path, tied: bool) -> None:
    raw = tiny_raw(tie_word_embeddings=tied)
    tensors = random_tensors(raw, BFLOAT16, seed=10)
    source = write_checkpoint(tmp_path / "source", tensors, raw, shards=3)
    checkpoint = HFCheckpoint(source)
    mesh = make_mesh(replica=2, fsdp=2, context=1, tensor=2)  # replicas must not be written twice
    params = read_parameters(checkpoint, parameter_shardings(checkpoint.config, Placement(mesh)))
    write_hf(params, checkpoint.config, Assets.read(source), tmp_path / "back")
    assert_same_bytes(read_checkpoint(tmp_path / "back"), tensors)
    hosted = jax.tree.map(np.asarray, params)
    write_hf(hosted, checkpoint.config, Assets.read(source), tmp_path / "hosted", max_shard_bytes=1)
    assert_same_bytes(read_checkpoint(tmp_path / "hosted"), tensors)
    assert len(list((tmp_path / "hosted").glob("*.safetensors"))) == len(tensors)


def test_transformers_loads_what_is_written(tmp_path: pathlib.Path) -> None:
    raw = tiny_raw(tie_word_embeddings=False)
    tensors = random_tensors(raw, np.float32, seed=11)
    back = convert_both_ways(write_checkpoint(tmp_path / "source", tensors, raw), tmp_path, max_shard_bytes=40_000)
    state = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="float32").state_dict()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(state[name].numpy(), tensor)


def test_the_index_gives_the_place_of_every_tensor(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), BFLOAT16, seed=12)
    back = convert_both_ways(write_checkpoint(tmp_path / "source", tensors), tmp_path, max_shard_bytes=20_000)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(path.name for path in back.glob("*.safetensors"))
    assert set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    limits = {file: sum(tensors[name].nbytes for name, f in index["weight_map"].items() if f == file) for file in files}
    assert max(limits.values()) <= 20_000


def test_a_shape_that_does_not_fit_the_configuration_is_named(tmp_path: pathlib.Path) -> None:
    source = write_checkpoint(tmp_path / "source", random_tensors(tiny_raw(), np.float32, seed=13))
    params = load_params(source)
    params["norm"]["scale"] = params["norm"]["scale"][:-1]
    with pytest.raises(ValueError, match=r"parameter norm/scale has shape \(47,\); the configuration makes it \(48,\)"):
        write_hf(params, HFCheckpoint(source).config, Assets(), tmp_path / "back")


def test_a_dtype_by_any_name_is_the_same(tmp_path: pathlib.Path) -> None:
    source = write_checkpoint(tmp_path / "source", random_tensors(tiny_raw(), np.float32, seed=14))
    for dtype in ("bfloat16", ml_dtypes.bfloat16, jax.numpy.bfloat16):
        assert {leaf.dtype for leaf in jax.tree.leaves(load_params(source, dtype=dtype))} == {BFLOAT16}
