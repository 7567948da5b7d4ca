"""Hugging Face tensors become the parameter tree, whole or in shards, wherever they are to live."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from tests.checkpoints.tiny_hf import BFLOAT16, random_tensors, read_checkpoint, stacked_leaves, write_checkpoint
from tests.models.tiny import tiny_config, tiny_raw
from vibethinker_jax.checkpoints.hf import HFCheckpoint, get_leaf, read_parameters
from vibethinker_jax.checkpoints.layout import tensor_kinds
from vibethinker_jax.checkpoints.safetensors import SafetensorsFile
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import abstract_params, parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement


def leaves(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_of_kinds_has_the_leaves_of_the_model(tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, head_dim=10)  # head_dim * heads is not the hidden size
    expected = {path: leaf.shape for path, leaf in leaves(abstract_params(config)).items()}
    assert {kind.path: kind.leaf_shape(config) for kind in tensor_kinds(config)} == expected


def test_each_weight_lands_where_its_input_output_and_head_say(tmp_path: pathlib.Path) -> None:
    raw = tiny_raw()
    tensors = random_tensors(raw, np.float32, seed=0)
    params = read_parameters(HFCheckpoint(write_checkpoint(tmp_path / "c", tensors, raw)))
    # hidden 48 = 6 heads of 8; layer 2, head 5, dimension 3 reads input 41.
    attention = params["layers"]["attention"]
    layer = "model.layers.2.self_attn"
    assert attention["q"]["kernel"][2, 41, 5, 3] == tensors[f"{layer}.q_proj.weight"][5 * 8 + 3, 41]
    assert attention["k"]["kernel"][2, 41, 1, 3] == tensors[f"{layer}.k_proj.weight"][1 * 8 + 3, 41]
    assert attention["v"]["bias"][2, 1, 3] == tensors[f"{layer}.v_proj.bias"][1 * 8 + 3]
    assert attention["out"]["kernel"][2, 5, 3, 41] == tensors[f"{layer}.o_proj.weight"][41, 5 * 8 + 3]
    assert (
        params["layers"]["mlp"]["down"]["kernel"][1, 70, 41] == tensors["model.layers.1.mlp.down_proj.weight"][41, 70]
    )
    assert params["embed"]["table"].shape == (128, 48)
    np.testing.assert_array_equal(params["embed"]["table"][:97], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["embed"]["table"][97:], 0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_on_a_mesh_are_the_slices_that_the_rules_give(tmp_path: pathlib.Path, tied: bool, shards: int) -> None:
    raw = tiny_raw(tie_word_embeddings=tied)
    tensors = random_tensors(raw, BFLOAT16, seed=1)
    checkpoint = HFCheckpoint(write_checkpoint(tmp_path / "c", tensors, raw, shards))
    shardings = parameter_shardings(checkpoint.config, Placement(make_mesh(fsdp=2, context=2, tensor=2)))
    params, expected = leaves(read_parameters(checkpoint, shardings)), stacked_leaves(tensors, raw)
    assert params.keys() == expected.keys()
    for path, leaf in params.items():
        sharding = get_leaf(shardings, path)
        assert leaf.sharding == sharding
        assert leaf.dtype == BFLOAT16
        for shard in leaf.addressable_shards:
            assert shard.index == sharding.devices_indices_map(leaf.shape)[shard.device]
            assert np.asarray(shard.data).tobytes() == expected[path][shard.index].tobytes(), path
    # hidden over fsdp x context and heads over tensor: 48 / 4 and 6 / 2.
    assert params["layers/attention/q/kernel"].addressable_shards[0].data.shape == (3, 12, 3, 8)


def test_unsharded_leaves_are_the_same_numbers_and_none_shardings_mean_the_default_device(
    tmp_path: pathlib.Path,
) -> None:
    raw = tiny_raw()
    tensors = random_tensors(raw, np.float16, seed=2)
    checkpoint = HFCheckpoint(write_checkpoint(tmp_path / "c", tensors, raw))
    unplaced = parameter_shardings(checkpoint.config, Placement(None))
    for params in (read_parameters(checkpoint), read_parameters(checkpoint, unplaced)):
        for path, expected in stacked_leaves(tensors, raw).items():
            leaf = get_leaf(params, path)
            assert isinstance(leaf, jax.Array)
            assert np.asarray(leaf).tobytes() == expected.tobytes()


def test_eight_devices_do_not_read_a_file_eight_times(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tiny_raw()
    tensors = random_tensors(raw, BFLOAT16, seed=3)
    checkpoint = HFCheckpoint(write_checkpoint(tmp_path / "c", tensors, raw))
    read_bytes = []
    read = SafetensorsFile.read

    def counting(self: SafetensorsFile, *args: Any) -> np.ndarray:
        read_bytes.append((array := read(self, *args)).nbytes)
        return array

    monkeypatch.setattr(SafetensorsFile, "read", counting)
    read_parameters(checkpoint, parameter_shardings(checkpoint.config, Placement(make_mesh(fsdp=8))))
    assert sum(read_bytes) == sum(tensor.nbytes for tensor in tensors.values())


def test_tables_read_in_pieces_are_the_same(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tiny_raw(tie_word_embeddings=False)
    tensors = random_tensors(raw, np.float32, seed=4)
    monkeypatch.setattr("vibethinker_jax.checkpoints.hf._BLOCK_BYTES", 7 * 48 * 4)  # 97 rows in pieces of 7
    checkpoint = HFCheckpoint(write_checkpoint(tmp_path / "c", tensors, raw))
    shardings = parameter_shardings(checkpoint.config, Placement(make_mesh(fsdp=2, context=4)))
    for params in (read_parameters(checkpoint), read_parameters(checkpoint, shardings)):
        for path in ("embed/table", "lm_head/table"):
            np.testing.assert_array_equal(get_leaf(params, path), stacked_leaves(tensors, raw)[path])


def test_a_dtype_converts_and_a_kind_of_two_dtypes_is_stacked_in_float32(tmp_path: pathlib.Path) -> None:
    raw = tiny_raw()

    def dtype(name: str) -> np.dtype:
        return np.dtype(np.float16) if "layers.1.mlp.up" in name else BFLOAT16

    tensors = random_tensors(raw, dtype, seed=5)
    checkpoint = HFCheckpoint(write_checkpoint(tmp_path / "c", tensors, raw))
    assert checkpoint.mixed_dtypes() == {
        "model.layers.0.mlp.up_proj.weight": "bfloat16",
        "model.layers.1.mlp.up_proj.weight": "float16",
        "model.layers.2.mlp.up_proj.weight": "bfloat16",
    }
    params = read_parameters(checkpoint)
    assert {path for path, leaf in leaves(params).items() if leaf.dtype == np.float32} == {"layers/mlp/up/kernel"}
    for layer in range(3):
        expected = tensors[f"model.layers.{layer}.mlp.up_proj.weight"].astype(np.float32).T
        np.testing.assert_array_equal(params["layers"]["mlp"]["up"]["kernel"][layer], expected)
    assert {leaf.dtype for leaf in leaves(read_parameters(checkpoint, dtype="float32")).values()} == {
        np.dtype(np.float32)
    }


def test_converting_while_reading_names_the_tensor_that_overflows(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), np.float32, seed=6)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = 1e5
    checkpoint = HFCheckpoint(write_checkpoint(tmp_path / "c", tensors))
    with pytest.raises(
        UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: holds 100000, too large for float16"
    ):
        read_parameters(checkpoint, dtype="float16")


def test_rotary_frequencies_of_old_files_are_ignored_and_nothing_else(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), np.float32, seed=7)
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    checkpoint = HFCheckpoint(write_checkpoint(tmp_path / "c", {**tensors, **inverse}))
    assert leaves(read_parameters(checkpoint)).keys() == stacked_leaves(tensors, tiny_raw()).keys()
    with pytest.raises(UserError, match=r"has model\.layers\.0\.self_attn\.rotary_emb\.scale, for which"):
        HFCheckpoint(
            write_checkpoint(
                tmp_path / "d",
                {**tensors, "model.layers.0.self_attn.rotary_emb.scale": np.ones(1)[:1].astype(np.float32)},
            )
        )


def test_reading_back_what_the_package_wrote_is_the_identity(tmp_path: pathlib.Path) -> None:
    tensors = random_tensors(tiny_raw(), BFLOAT16, seed=8, any_bits=True)
    directory = write_checkpoint(tmp_path / "c", tensors, shards=3)
    assert read_checkpoint(directory).keys() == tensors.keys()
    checkpoint = HFCheckpoint(directory)
    for name, tensor in tensors.items():
        assert checkpoint.read(name).tobytes() == tensor.tobytes()
