"""Plans that were made before: JSON files in the user's cache directory, by digest of everything that decides them."""

import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

VERSIONED = ("jax", "jaxlib", "libtpu", "flax", "optax")


def directory() -> pathlib.Path:
    """Where plans are kept (XDG_CACHE_HOME is respected)."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "vibethinker_jax" / "plans"


def key(config: Mapping[str, Any], topology: str, model: Mapping[str, Any]) -> str:
    """Digest of configuration, topology, model shape, versions of what compiles, and this package's code."""
    content = {
        "config": config,
        "topology": topology,
        "model": model,
        "versions": {name: _version(name) for name in VERSIONED},
        "code": _code_digest(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def load(name: str) -> dict[str, Any] | None:
    """What `store` wrote under this key, or None; an unreadable file counts as none."""
    try:
        return json.loads((directory() / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


def store(name: str, content: Mapping[str, Any]) -> None:
    """Keeps a plan. Written aside and renamed, so that another process never reads half of it."""
    path = directory() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(json.dumps(content, allow_nan=False))
    aside.replace(path)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _code_digest() -> str:
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).resolve().parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
