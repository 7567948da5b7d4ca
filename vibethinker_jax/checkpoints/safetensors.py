"""The safetensors container: 8 bytes of header length, a JSON header, then the tensors back to back.

Our own reader and writer, because a checkpoint larger than memory has to be checked from its headers, read in parts
without mapping it (mapped pages count as resident memory), written one tensor at a time, and because a damaged file
should be reported by file and tensor. The format is documented at https://huggingface.co/docs/safetensors.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from vibethinker_jax.checkpoints.precision import BFLOAT16, FLOAT16, FLOAT32, bits
from vibethinker_jax.errors import UserError

DTYPES = {"BF16": BFLOAT16, "F16": FLOAT16, "F32": FLOAT32}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The reference implementation refuses longer headers; one of ours is about 100 bytes per tensor.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: name, dtype, shape, and `start` and `end` in bytes from the beginning of the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class SafetensorsFile:
    """A validated file. Only the header is in memory; `read` opens the file each time, so nothing needs closing.

    Attributes:
        path: of the file.
        tensors: TensorInfo by name, in file order.
    """

    def __init__(self, path: epath.PathLike):
        """Reads and checks the header.

        Raises:
            UserError: naming the file and, where there is one, the tensor: absent or cut short, malformed header,
                unknown dtype, a size that is not shape times item size, gaps, overlaps, or bytes left over.
        """
        self.path = epath.Path(path)
        if not self.path.exists():
            raise UserError(f"{self.path}: no such file; copy it again from its source")
        header, data_start, file_bytes = _read_header(self.path)
        self.tensors = _check_header(self.path, header, data_start, file_bytes)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Reads a tensor, or its rows [start, stop) along the first axis, into new memory (read-only).

        Raises:
            UserError: the file has been cut short since it was opened.
        """
        info = self.tensors[name]
        offset, nbytes, shape = info.start, info.nbytes, info.shape
        if info.shape and (start, stop) != (0, None):
            stop = info.shape[0] if stop is None else min(stop, info.shape[0])
            row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
            offset, nbytes, shape = offset + start * row_bytes, (stop - start) * row_bytes, (stop - start, *shape[1:])
        with self.path.open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
        if len(data) != nbytes:
            raise UserError(f"{self.path}: is cut short inside tensor {name}; copy the file again from its source")
        return np.frombuffer(data, info.dtype).reshape(shape)


class SafetensorsWriter:
    """Writes a file tensor by tensor, in the order declared. Use as a context manager.

    Leaving the block normally before everything declared is written raises ValueError, a bug of the caller.
    """

    def __init__(self, path: epath.PathLike, tensors: Sequence[tuple[str, np.dtype, Sequence[int]]]):
        """Args: path of the new file; (name, dtype, shape) of every tensor to come."""
        self._path = epath.Path(path)
        self._pending = list(tensors)
        self._file: Any = None

    def __enter__(self) -> "SafetensorsWriter":
        # transformers refuses files that do not say which framework's layout they follow.
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in self._pending:
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
        self._file = self._path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        return self

    def write(self, name: str, blocks: Iterable[np.ndarray]) -> None:
        """Writes the next tensor, given in pieces along its first axis."""
        expected, dtype, shape = self._pending.pop(0)
        if name != expected:
            raise ValueError(f"{self._path}: {name} written where {expected} was declared")
        count = 0
        for block in blocks:
            if block.dtype != dtype or block.shape[1:] != tuple(shape)[1:]:
                raise ValueError(f"{name}: {block.dtype}{block.shape} is no part of {dtype}{tuple(shape)}")
            count += block.size
            self._file.write(bits(block).view(np.uint8).data)
        if count != math.prod(shape):
            raise ValueError(f"{name}: {count} values written of {math.prod(shape)}")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._file.close()
        if kind is None and self._pending:
            raise ValueError(f"{self._path}: {self._pending[0][0]} was declared but not written")


def _read_header(path: epath.Path) -> tuple[Mapping[str, Any], int, int]:
    """The parsed header, the position of the first tensor byte, and the length of the file."""
    file_bytes = path.stat().length
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise UserError(f"{path}: is only {len(prefix)} bytes long; copy the file again from its source")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > _MAX_HEADER_BYTES:
            raise UserError(f"{path}: header length is {header_bytes}; this is not a safetensors file")
        if 8 + header_bytes > file_bytes:
            raise UserError(
                f"{path}: is cut short inside its header ({file_bytes} of at least {8 + header_bytes} bytes); "
                "copy the file again from its source"
            )
        text = file.read(header_bytes)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}: header has {twice} twice; write the file again")
        return mapping

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: header is not valid JSON ({error}); copy the file again from its source") from error
    if not isinstance(header, dict):
        raise UserError(f"{path}: header is a JSON {type(header).__name__}; expected an object")
    return header, 8 + header_bytes, file_bytes


def _check_header(
    path: epath.Path, header: Mapping[str, Any], data_start: int, file_bytes: int
) -> dict[str, TensorInfo]:
    infos = [_tensor_info(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]
    infos.sort(key=lambda info: (info.start, info.end))
    position = data_start
    for info in infos:
        if info.start != position:
            problem = "leaves a gap before it" if info.start > position else "overlaps the one before"
            raise UserError(
                f"{path}: tensor {info.name} starts at byte {info.start - data_start} of the data, which {problem} "
                f"(expected {position - data_start}); write the file again"
            )
        if info.end > file_bytes:
            raise UserError(
                f"{path}: is cut short: tensor {info.name} ends at byte {info.end}, the file at {file_bytes}; "
                "copy the file again from its source"
            )
        position = info.end
    if position != file_bytes:
        raise UserError(f"{path}: has {file_bytes - position} bytes after its last tensor; write the file again")
    return {info.name: info for info in infos}


def _tensor_info(path: epath.Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    def refuse(problem: str) -> UserError:
        return UserError(f"{path}: tensor {name}: {problem}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise refuse("header entry needs dtype, shape and data_offsets; write the file again")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise refuse(f"dtype is {entry['dtype']!r}; only {', '.join(DTYPES)} load, so convert the checkpoint first")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _natural_numbers(shape):
        raise refuse(f"shape is {shape!r}; expected a list of natural numbers")
    if not _natural_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets is {offsets!r}; expected [begin, end]")
    size = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != size:
        raise refuse(
            f"data_offsets {offsets} span {offsets[1] - offsets[0]} bytes, but {entry['dtype']} of shape {shape} "
            f"takes {size}; write the file again"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _natural_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
