"""Small JSON files that describe a run: written whole or not at all, and compared field by field."""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath


def write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
    """Written aside and renamed: a kill leaves the old file or the new one."""
    aside = path.parent / f"{path.name}.tmp"
    aside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    aside.replace(path)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted field, old value, new value) wherever two nested mappings differ; None for an absent one."""
    before, after = flatten(old), flatten(new)
    names = sorted(before.keys() | after.keys())
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
