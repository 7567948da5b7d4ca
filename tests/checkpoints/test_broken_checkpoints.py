"""Each kind of broken Hugging Face checkpoint is refused by name, and a conversion leaves nothing behind."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.tiny_hf import BFLOAT16, random_tensors, write_checkpoint
from tests.models.tiny import tiny_raw
from vibethinker_jax.checkpoints.convert import hf_to_orbax, orbax_to_hf
from vibethinker_jax.checkpoints.hf import HFCheckpoint
from vibethinker_jax.errors import UserError

INDEX = "model.safetensors.index.json"
Q1 = "model.layers.1.self_attn.q_proj.weight"


def change_index(directory: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


def shard_of(directory: pathlib.Path, name: str) -> pathlib.Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


BF16_ONES = np.ones((48, 48), BFLOAT16)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (Q1, None, f"lacks {Q1}, which config.json calls for"),
        ("model.norm.weight", None, "lacks model.norm.weight"),
        ("model.layers.2.self_attn.k_proj.bias", None, "lacks model.layers.2.self_attn.k_proj.bias"),
        ("model.layers.3.mlp.up_proj.weight", BF16_ONES, "has model.layers.3.mlp.up_proj.weight, for"),
        ("model.layers.0.self_attn.o_proj.bias", BF16_ONES, "has model.layers.0.self_attn.o_proj.bias"),
        (Q1, BF16_ONES[:, :40], rf"tensor {Q1} has shape \[48, 40\], but config.json makes it \[48, 48\]"),
        ("model.norm.weight", BF16_ONES, r"tensor model.norm.weight has shape \[48, 48\]"),
        (Q1, np.ones((48, 48), np.int8), f"tensor {Q1}: dtype is 'I8'"),
        (Q1, np.ones((48, 48)), f"tensor {Q1}: dtype is 'F64'"),
        ("lm_head.weight", np.ones((97, 48), BFLOAT16), "lm_head.weight differs from model.embed_tokens"),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: pathlib.Path, shards: int, name: str, tensor: np.ndarray | None, message: str
) -> None:
    tensors = random_tensors(tiny_raw(), BFLOAT16, seed=0)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    source = write_checkpoint(tmp_path / "source", tensors, shards=shards)
    with pytest.raises(UserError, match=message) as error:
        hf_to_orbax(source, tmp_path / "destination")
    assert str(source) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def truncate(directory: pathlib.Path) -> None:
    path = shard_of(directory, Q1)
    path.write_bytes(path.read_bytes()[:-1])


def empty_shard(directory: pathlib.Path) -> None:
    shard_of(directory, Q1).write_bytes(b"")


def remove_shard(directory: pathlib.Path) -> None:
    shard_of(directory, Q1).unlink()


def point_nowhere(directory: pathlib.Path) -> None:
    change_index(directory, lambda index: index["weight_map"].update({Q1: "model-00009-of-00003.safetensors"}))


def point_to_another_shard(directory: pathlib.Path) -> None:
    change_index(directory, lambda index: index["weight_map"].update({Q1: other_shard(directory, Q1)}))


def other_shard(directory: pathlib.Path, name: str) -> str:
    files = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
    return min(files - {shard_of(directory, name).name})


def point_outside(directory: pathlib.Path) -> None:
    change_index(directory, lambda index: index["weight_map"].update({Q1: "../model.safetensors"}))


def drop_from_index(directory: pathlib.Path) -> None:
    change_index(directory, lambda index: index["weight_map"].pop(Q1))


def duplicate(directory: pathlib.Path) -> None:
    import safetensors.numpy

    file = directory / other_shard(directory, Q1)
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({**tensors, Q1: BF16_ONES}, file)


def remove_index(directory: pathlib.Path) -> None:
    (directory / INDEX).unlink()


def both_kinds(directory: pathlib.Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def index_not_json(directory: pathlib.Path) -> None:
    (directory / INDEX).write_text('{"weight_map": {')


def index_without_map(directory: pathlib.Path) -> None:
    (directory / INDEX).write_text("[]")


def config_not_json(directory: pathlib.Path) -> None:
    (directory / "config.json").write_text("{")


def no_config(directory: pathlib.Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is cut short: tensor model"),
        (empty_shard, "is only 0 bytes long"),
        (remove_shard, f"{INDEX}: places .* in model-0000.-of-00003.safetensors, which does not exist"),
        (point_nowhere, f"{INDEX}: places {Q1} in model-00009-of-00003.safetensors, which does not exist"),
        (point_to_another_shard, f"{INDEX}: places {Q1} in .*, but it is in"),
        (point_outside, f"{INDEX}: places {Q1} in '../model.safetensors'; expected a safetensors file beside"),
        (drop_from_index, f"tensor {Q1} is not in {INDEX}"),
        (duplicate, f"tensor {Q1} is in both model-0000.* and model-0000.*; remove one"),
        (remove_index, "has neither model.safetensors nor .*found model-00001-of-00003"),
        (both_kinds, "has both model.safetensors and"),
        (index_not_json, f"{INDEX}: is not valid JSON"),
        (index_without_map, f"{INDEX}: has no weight_map"),
        (config_not_json, "config.json: is not valid JSON"),
        (no_config, "config.json: no such file"),
    ],
)
def test_damaged_directories_are_refused(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None], message: str
) -> None:
    source = write_checkpoint(tmp_path / "source", random_tensors(tiny_raw(), BFLOAT16, seed=1), shards=3)
    HFCheckpoint(source)
    damage(source)
    with pytest.raises(UserError, match=message):
        hf_to_orbax(source, tmp_path / "destination")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_file_cut_short_while_it_is_converted_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "source", random_tensors(tiny_raw(), BFLOAT16, seed=2), shards=3)
    real = HFCheckpoint.read

    def cutting(self: HFCheckpoint, name: str, *args: Any) -> np.ndarray:
        if name == "model.layers.2.mlp.down_proj.weight":
            path = shard_of(source, name)
            path.write_bytes(path.read_bytes()[:200])
        return real(self, name, *args)

    monkeypatch.setattr(HFCheckpoint, "read", cutting)
    with pytest.raises(UserError, match=r"cut short inside tensor model\.layers\.2\.mlp\.down_proj\.weight"):
        hf_to_orbax(source, tmp_path / "destination")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_directory_that_does_not_exist_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="nothing: no such directory"):
        hf_to_orbax(tmp_path / "nothing", tmp_path / "destination")
    with pytest.raises(UserError, match="nothing: no such directory"):
        orbax_to_hf(tmp_path / "nothing", tmp_path / "destination")


def test_pickled_weights_are_named_as_what_they_are(tmp_path: pathlib.Path) -> None:
    source = write_checkpoint(tmp_path / "source", random_tensors(tiny_raw(), BFLOAT16, seed=3))
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"found pytorch_model\.bin\); only safetensors load"):
        HFCheckpoint(source)
