"""Tries mesh shapes and rematerialisation policies for the training step of a configuration."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.qwen2 import REMAT_POLICIES
from vibethinker_jax.planning.plan import plan
from vibethinker_jax.planning.programs import read_model

SEARCHED_AXES = ("fsdp", "context", "tensor")


def candidates(config: ConfigDict, model: Qwen2Config, chips: int) -> list[tuple[dict[str, int], str]]:
    """(mesh sizes, remat policy) worth compiling: those that divide rows, heads and sequence.

    `replica` stays as configured: it is for several slices, which a topology is not.
    """
    replica = max(1, config.mesh.replica)
    found = []
    for fsdp, context, tensor in _factors(chips // replica, len(SEARCHED_AXES)) if chips % replica == 0 else ():
        rows = config.micro_batch_rows or replica * fsdp
        divides = (
            rows % (replica * fsdp) == 0
            and config.get("global_batch_rows", rows) % rows == 0
            and config.sequence_length % (2 * context) == 0
            and model.num_heads % tensor == 0
        )
        if divides:
            mesh = {"replica": replica, "fsdp": fsdp, "context": context, "tensor": tensor}
            found += [(mesh, remat) for remat in REMAT_POLICIES]
    return found


def search(
    config: ConfigDict, config_file: str, topology: str, chips: int, *, use_cache: bool = True
) -> list[dict[str, Any]]:
    """One row per candidate, those that fit first and the fastest of them first.

    Each compiles a whole training step, which takes minutes for a large model; plans are cached, so a search that was
    interrupted goes on where it stopped.
    """
    step = config.stage
    rows = []
    for mesh, remat in tqdm(candidates(config, read_model(config, config_file), chips), desc="search", unit="plan"):
        tried = copy.deepcopy(config)
        tried.mesh.update(**mesh)
        tried.remat = remat
        row: dict[str, Any] = {"mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1"}
        row |= {"remat": remat, "fits": False}
        row |= dict.fromkeys(("peak_bytes", "estimated_seconds", "tokens_per_second_per_chip", "mfu"))
        try:
            entry = plan(tried, config_file, topology, use_cache=use_cache, only=step)["steps"][step]
            row |= {name: entry[name] for name in row if name in entry}
        except UserError as error:
            row["refused"] = str(error)
        rows.append(row)
    front = pareto([(row["peak_bytes"], row["tokens_per_second_per_chip"]) if row["fits"] else None for row in rows])
    rows = [row | {"pareto": best} for row, best in zip(rows, front, strict=True)]
    return sorted(rows, key=lambda row: (not row["fits"], -(row["tokens_per_second_per_chip"] or 0)))


def pareto(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Which (memory, rate) no other has at most the memory of and at least the rate of, with one of them better."""

    def beats(other: tuple[float, float], point: tuple[float, float]) -> bool:
        return other[0] <= point[0] and other[1] >= point[1] and other != point

    real = [point for point in points if point is not None]
    return [point is not None and not any(beats(other, point) for other in real) for point in points]


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `number` as a product of `count` sizes."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)
