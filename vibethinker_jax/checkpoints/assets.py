"""What travels with the weights: config.json, the tokenizer's files, chat template and generation settings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from etils import epath

from vibethinker_jax.checkpoints.directory import absolute_path
from vibethinker_jax.models.config import Qwen2Config

CONFIG_FILE = "config.json"
ASSET_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "README.md",
)


@dataclass(frozen=True)
class Assets:
    """Files beside the weights, kept byte for byte.

    Attributes:
        files: contents by name, of those in ASSET_FILES that the source has.
        config_json: the source's config.json, so that it comes out unchanged where no field is; None for a model
            that has never been on disk.
        redundant_head: whether the source stores the tied head a second time; exports then do too.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    config_json: bytes | None = None
    redundant_head: bool = False

    @classmethod
    def read(cls, directory: epath.PathLike, redundant_head: bool = False) -> "Assets":
        """Reads the files of a directory; those that it does not have are left out."""
        directory = absolute_path(directory)
        files = {name: (directory / name).read_bytes() for name in ASSET_FILES if (directory / name).exists()}
        config = directory / CONFIG_FILE
        return cls(files, config.read_bytes() if config.exists() else None, redundant_head)

    def with_file(self, name: str, contents: bytes) -> "Assets":
        """The same assets with one file added or replaced."""
        return replace(self, files={**self.files, name: contents})

    def write_files(self, directory: epath.Path) -> None:
        """Writes all files but config.json, without which a directory does not load and which comes last."""
        for name, contents in self.files.items():
            (directory / name).write_bytes(contents)

    def write_config(self, directory: epath.Path, config: Qwen2Config, dtype: np.dtype | None = None) -> None:
        """Writes config.json: the source's bytes, unless `config` or `dtype` changes fields; then only these differ.

        Args:
            directory: to write to.
            config: the model's shape.
            dtype: what config.json is to declare; None leaves its declaration alone.
        """
        fields = config.to_hf()
        if dtype is not None:
            # transformers 5 calls the field dtype, earlier versions torch_dtype.
            names = [name for name in ("dtype", "torch_dtype") if name in fields] or ["torch_dtype"]
            fields |= dict.fromkeys(names, str(dtype))
        contents = self.config_json
        if contents is None or json.loads(contents) != fields:
            contents = _dump(fields)
        (directory / CONFIG_FILE).write_bytes(contents)


def _dump(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
