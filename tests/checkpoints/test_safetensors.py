"""The container against the safetensors package, and every way in which a file can be damaged."""

import json
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from vibethinker_jax.checkpoints.safetensors import SafetensorsFile, SafetensorsWriter
from vibethinker_jax.errors import UserError

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)]


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, np.ndarray]:
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), max_size=5, unique=True))
    tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        size = int(np.prod(shape)) * dtype.itemsize
        tensors[name] = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)
    tensors.pop("__metadata__", None)
    return tensors


@hypothesis.given(tensor_sets())
@hypothesis.settings(max_examples=50, deadline=None)
def test_files_of_the_package_are_read_bit_for_bit(tmp_path_factory: Any, tensors: dict[str, np.ndarray]) -> None:
    path = tmp_path_factory.mktemp("read") / "x.safetensors"
    safetensors.numpy.save_file(tensors, path)
    file = SafetensorsFile(path)
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = file.read(name)
        assert (read.dtype, read.shape, read.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())


@hypothesis.given(tensor_sets())
@hypothesis.settings(max_examples=50, deadline=None)
def test_the_package_reads_our_files_bit_for_bit(tmp_path_factory: Any, tensors: dict[str, np.ndarray]) -> None:
    path = tmp_path_factory.mktemp("write") / "x.safetensors"
    with SafetensorsWriter(path, [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, [tensor])
    read = safetensors.numpy.load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape, read[name].tobytes()) == (
            tensor.dtype,
            tensor.shape,
            tensor.tobytes(),
        )


def test_rows_of_a_tensor_are_read_and_written_in_pieces(tmp_path: pathlib.Path) -> None:
    tensor = np.arange(7 * 3, dtype=np.float32).reshape(7, 3)
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, [("a", tensor.dtype, tensor.shape)]) as writer:
        writer.write("a", iter([tensor[:2], tensor[2:6], tensor[6:]]))
    np.testing.assert_array_equal(SafetensorsFile(path).read("a", 2, 5), tensor[2:5])
    np.testing.assert_array_equal(SafetensorsFile(path).read("a", 5), tensor[5:])


def test_tensors_start_at_multiples_of_eight_bytes(tmp_path: pathlib.Path) -> None:
    for length in range(1, 10):
        path = tmp_path / f"{length}.safetensors"
        with SafetensorsWriter(path, [("n" * length, DTYPES[0], (2,))]) as writer:
            writer.write("n" * length, [np.ones(2, DTYPES[0])])
        assert SafetensorsFile(path).tensors["n" * length].start % 8 == 0


def test_the_writer_refuses_what_was_not_declared(tmp_path: pathlib.Path) -> None:
    declared = [("a", DTYPES[2], (2, 3)), ("b", DTYPES[2], (4,))]
    with pytest.raises(ValueError, match="b was declared"), SafetensorsWriter(tmp_path / "1", declared) as writer:
        writer.write("a", [np.ones((2, 3), np.float32)])
    with pytest.raises(ValueError, match="c written where a"), SafetensorsWriter(tmp_path / "2", declared) as writer:
        writer.write("c", [np.ones((2, 3), np.float32)])
    with (
        pytest.raises(ValueError, match="3 values written of 6"),
        SafetensorsWriter(tmp_path / "3", declared) as writer,
    ):
        writer.write("a", [np.ones((1, 3), np.float32)])
    with pytest.raises(ValueError, match="no part of"), SafetensorsWriter(tmp_path / "4", declared) as writer:
        writer.write("a", [np.ones((2, 3), np.float16)])


def write_raw(path: pathlib.Path, header: Mapping[str, Any] | bytes, data: bytes) -> pathlib.Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": entry("F32", [2, 3], [0, 24])}, 23, "cut short: tensor w ends at byte"),
        ({"w": entry("F32", [2, 3], [0, 24])}, 25, "has 1 bytes after its last tensor"),
        ({"w": entry("F32", [2, 3], [0, 20])}, 20, "tensor w: data_offsets .* span 20 bytes, but F32 .* takes 24"),
        ({"w": entry("BF16", [2, 3], [0, 24])}, 24, "tensor w: .* takes 12"),
        ({"w": entry("I8", [6], [0, 6])}, 6, "tensor w: dtype is 'I8'; only BF16, F16, F32 load"),
        ({"w": entry(3, [6], [0, 6])}, 6, "tensor w: dtype is 3"),
        ({"w": entry("F32", [-1, 2], [0, 8])}, 8, "tensor w: shape is"),
        ({"w": entry("F32", "2", [0, 8])}, 8, "tensor w: shape is '2'"),
        ({"w": entry("F32", [2], [0, 8, 8])}, 8, "tensor w: data_offsets is"),
        ({"w": entry("F32", [2], [8, 0])}, 8, "tensor w: data_offsets is"),
        ({"w": {"dtype": "F32", "shape": [2]}}, 8, "tensor w: header entry needs"),
        ({"w": 3}, 8, "tensor w: header entry needs"),
        ({"v": entry("F32", [2], [0, 8]), "w": entry("F32", [1], [12, 16])}, 16, "tensor w starts at byte 12 .* a gap"),
        ({"v": entry("F32", [2], [0, 8]), "w": entry("F32", [2], [4, 12])}, 12, "tensor w starts at byte 4 .*overlaps"),
        ([], 0, "header is a JSON list"),
        (b'{"w": ', 0, "header is not valid JSON"),
        (b"\xff\xfe", 0, "header is not valid JSON"),
        (
            b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            4,
            "header has w twice",
        ),
    ],
)
def test_a_damaged_file_is_named_with_its_tensor(tmp_path: pathlib.Path, header: Any, data: int, message: str) -> None:
    path = write_raw(tmp_path / "broken.safetensors", header, bytes(data))
    with pytest.raises(UserError, match=message) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is only 0 bytes long"),
        (b"\0" * 7, "is only 7 bytes long"),
        (struct.pack("<Q", 100) + b"{}", "cut short inside its header"),
        (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
    ],
)
def test_a_file_without_a_whole_header_is_refused(tmp_path: pathlib.Path, contents: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(contents)
    with pytest.raises(UserError, match=message):
        SafetensorsFile(tmp_path / "x.safetensors")


def test_an_absent_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"none\.safetensors: no such file"):
        SafetensorsFile(tmp_path / "none.safetensors")


def test_a_file_cut_short_after_opening_is_noticed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones(8, np.float32)}, path)
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="cut short inside tensor a"):
        file.read("a")
