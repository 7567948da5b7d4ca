"""Policy checkpoints: saved from and restored to any mesh, recognised, and refused when incomplete or damaged."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from tests.checkpoints.tiny_hf import BFLOAT16, SIDE_FILES, random_tensors, stacked_leaves, write_checkpoint
from tests.models.tiny import tiny_raw
from vibethinker_jax.checkpoints import directory as directory_module
from vibethinker_jax.checkpoints.convert import hf_to_orbax, orbax_to_hf
from vibethinker_jax.checkpoints.directory import new_directory
from vibethinker_jax.checkpoints.hf import HFCheckpoint, get_leaf
from vibethinker_jax.checkpoints.store import (
    detect_format,
    load_params,
    load_policy_params,
    model_directory,
    read_assets,
    save_policy,
)
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement

MESHES = [None, {"fsdp": 2, "context": 2, "tensor": 2}, {"replica": 2, "fsdp": 4}]


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    raw = tiny_raw(tie_word_embeddings=False)
    return write_checkpoint(tmp_path / "source", random_tensors(raw, BFLOAT16, seed=0), raw, shards=3)


@pytest.fixture
def expected() -> dict[str, np.ndarray]:
    raw = tiny_raw(tie_word_embeddings=False)
    return stacked_leaves(random_tensors(raw, BFLOAT16, seed=0), raw)


def shardings_on(source: pathlib.Path, axes: dict[str, int] | None) -> Any:
    mesh = None if axes is None else make_mesh(**axes)
    return parameter_shardings(HFCheckpoint(source).config, Placement(mesh))


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 2), (2, 0), (1, 1)])
def test_a_policy_moves_between_meshes(
    tmp_path: pathlib.Path, source: pathlib.Path, expected: dict[str, np.ndarray], before: int, after: int
) -> None:
    config, assets = HFCheckpoint(source).config, read_assets(source)
    save_policy(load_params(source, shardings_on(source, MESHES[before])), config, assets, tmp_path / "policy")
    shardings = shardings_on(source, MESHES[after])
    params = load_policy_params(tmp_path / "policy", shardings)
    for path, leaf in expected.items():
        restored = get_leaf(params, path)
        assert isinstance(restored, jax.Array)
        assert np.asarray(restored).tobytes() == leaf.tobytes()
        assert MESHES[after] is None or restored.sharding == get_leaf(shardings, path)
    for name, contents in SIDE_FILES.items():
        assert (tmp_path / "policy" / name).read_bytes() == contents


def test_a_converted_policy_is_restored_straight_to_a_mesh_in_another_dtype(
    tmp_path: pathlib.Path, source: pathlib.Path, expected: dict[str, np.ndarray]
) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    shardings = shardings_on(source, MESHES[1])
    params = load_params(tmp_path / "policy", shardings, "float32")
    for path, leaf in expected.items():
        restored = get_leaf(params, path)
        np.testing.assert_array_equal(restored, leaf.astype(np.float32))
        assert restored.sharding == get_leaf(shardings, path)


def test_formats_are_recognised(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "model").mkdir()
    assert detect_format(source) == "hf"
    assert detect_format(tmp_path / "policy") == "orbax"
    assert detect_format(tmp_path / "run") == "training"
    assert model_directory(tmp_path / "run") == tmp_path / "run" / "model"
    assert model_directory(source) == source
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: holds no checkpoint; expected config\.json with"):
        detect_format(tmp_path / "empty")
    with pytest.raises(UserError, match="nowhere: no such directory"):
        detect_format(tmp_path / "nowhere")
    (tmp_path / "policy").rename(tmp_path / "policy.partial")
    with pytest.raises(UserError, match="left over from an interrupted write"):
        detect_format(tmp_path / "policy.partial")


@pytest.mark.parametrize("missing", ["manifest.json", "params", "params/_METADATA", "config.json"])
def test_an_incomplete_policy_does_not_load(tmp_path: pathlib.Path, source: pathlib.Path, missing: str) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    path = tmp_path / "policy" / missing
    path.rename(tmp_path / "gone")
    with pytest.raises(UserError):
        load_params(tmp_path / "policy")
    with pytest.raises(UserError):
        orbax_to_hf(tmp_path / "policy", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "manifest.json: version is 2; this program reads version 1"),
        ({"surprise": 1}, "manifest.json: has the wrong fields"),
    ],
)
def test_a_manifest_of_another_version_is_refused(
    tmp_path: pathlib.Path, source: pathlib.Path, change: dict[str, int], message: str
) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    manifest = tmp_path / "policy" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        load_params(tmp_path / "policy")
    manifest.write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json: is not valid JSON"):
        load_params(tmp_path / "policy")


def test_parameters_of_another_model_are_refused(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    config = tmp_path / "policy" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "intermediate_size": 88}))
    with pytest.raises(
        UserError, match=r"mlp/down/kernel has shape \[3, 80, 48\], but config.json makes it \[3, 88, 48\]"
    ):
        load_params(tmp_path / "policy")
    config.write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"parameters do not match config\.json: lm_head/table"):
        load_params(tmp_path / "policy")


@pytest.mark.parametrize("placed", [True, False])
def test_a_flipped_bit_is_noticed(tmp_path: pathlib.Path, source: pathlib.Path, placed: bool) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    data = max((tmp_path / "policy" / "params").glob("**/d/*"), key=lambda path: path.stat().st_size)
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 0x10
    data.write_bytes(contents)
    # zstd decodes many a flipped bit without noticing, so either its decoder or the checksum finds it.
    shardings = shardings_on(source, MESHES[2] if placed else None)
    with pytest.raises(UserError, match=r"parameter .* (is damaged \(checksum|cannot be read)"):
        load_params(tmp_path / "policy", shardings)


def test_a_missing_data_file_is_reported_with_the_parameter(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    for data in (tmp_path / "policy" / "params" / "ocdbt.process_0" / "d").iterdir():
        data.unlink()
    with pytest.raises(UserError, match="parameter embed/table cannot be read"):
        load_params(tmp_path / "policy")


def test_a_damaged_parameter_is_named(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    manifest = tmp_path / "policy" / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["checksums"]["layers/mlp/up/kernel"] ^= 1
    manifest.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="parameter layers/mlp/up/kernel is damaged"):
        load_params(tmp_path / "policy")
    with pytest.raises(UserError, match="parameter layers/mlp/up/kernel is damaged"):
        orbax_to_hf(tmp_path / "policy", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_steps_are_for_training_checkpoints(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    hf_to_orbax(source, tmp_path / "policy")
    for path in (source, tmp_path / "policy"):
        with pytest.raises(UserError, match=r"step is 3, but a .* checkpoint has no steps"):
            load_params(path, step=3)
    with pytest.raises(UserError, match="is a Hugging Face checkpoint; expected a policy or training"):
        orbax_to_hf(source, tmp_path / "back")


def test_a_destination_in_use_is_refused_and_left_alone(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for destination, message in (
        ("used", "exists and is not empty"),
        ("file", "is a file"),
        ("a.partial", "unfinished"),
    ):
        with pytest.raises(UserError, match=message):
            hf_to_orbax(source, tmp_path / destination)
    with pytest.raises(UserError, match="exists and is not empty"):
        hf_to_orbax(source, source)
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["precious"]
    assert detect_format(source) == "hf"


def test_an_empty_destination_new_parents_and_the_home_directory_are_fine(
    tmp_path: pathlib.Path, source: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    hf_to_orbax(source, tmp_path / "empty")
    hf_to_orbax(source, tmp_path / "new" / "parents" / "policy")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hf_to_orbax("source", "~/home")
    for path in (tmp_path / "empty", tmp_path / "new" / "parents" / "policy", tmp_path / "home"):
        assert detect_format(path) == "orbax"


def test_what_an_interrupted_write_left_is_replaced(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    (tmp_path / "policy.partial" / "params").mkdir(parents=True)
    (tmp_path / "policy.partial" / "old").write_text("left over")
    hf_to_orbax(source, tmp_path / "policy")
    assert not (tmp_path / "policy.partial").exists()
    assert not (tmp_path / "policy" / "old").exists()
    assert not (tmp_path / "policy" / ".owner").exists()


def test_of_two_writers_the_one_that_was_overtaken_stops(tmp_path: pathlib.Path) -> None:
    first = new_directory(tmp_path / "d")
    first.__enter__()
    second = new_directory(tmp_path / "d")
    (second.__enter__() / "b").write_text("second")
    with pytest.raises(UserError, match="another process has started to write"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["b"]


@pytest.mark.parametrize("fails", [True, False])
def test_on_an_object_store_files_go_to_their_place_and_the_manifest_comes_last(
    tmp_path: pathlib.Path, source: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    # A local directory stands in for gs://: no renaming, so order is what protects.
    monkeypatch.setattr(directory_module, "on_object_store", lambda path: True)
    seen = []

    def write_manifest(self: Any, directory: pathlib.Path) -> None:
        seen.append({path.name for path in directory.iterdir()})
        if fails:
            raise OSError("the store is gone")
        (directory / "manifest.json").write_text("{}")

    monkeypatch.setattr("vibethinker_jax.checkpoints.store.Manifest.write", write_manifest)
    if fails:
        with pytest.raises(OSError, match="the store is gone"):
            hf_to_orbax(source, tmp_path / "policy")
        assert not (tmp_path / "policy").exists()
    else:
        hf_to_orbax(source, tmp_path / "policy")
        assert detect_format(tmp_path / "policy") == "orbax"
    assert seen == [{"params", "config.json", *SIDE_FILES}]
