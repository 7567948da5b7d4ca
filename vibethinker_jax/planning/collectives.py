"""Collective communication of a program: bytes by kind and by mesh axis.

Bytes are those of the whole array on one chip, that is the larger of a collective's operand and result: what an
all-gather yields, what a reduce-scatter takes, what an all-reduce reduces, what a permute passes on. `wire_bytes` says
how much of it a chip sends.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vibethinker_jax.planning.hlo import Computation, Instruction, Module

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\)(?=\s*\{))?\s*\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: one of KINDS.
        axes: mesh axes along which chips exchange; ("other",) for groups that are not a product of axes.
        group: chips that exchange with each other.
        bytes: of one execution, per chip (see the module).
        runs: executions.
        blocking: whether nothing else is computed meanwhile.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: int
    runs: int
    blocking: bool

    @property
    def wire_bytes(self) -> float:
        """What one chip sends in one execution by the ring algorithms: n - 1 of n parts, twice for an all-reduce."""
        if self.kind == "collective-permute":
            return float(self.bytes)
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.bytes * (self.group - 1) / self.group


def collectives(module: Module, mesh: Mapping[str, int]) -> list[Collective]:
    """All collectives of the program that move anything.

    Args:
        module: the optimized program.
        mesh: sizes of the axes, major first; partition i is device i of the mesh.
    """
    found: list[Collective] = []
    fused: dict[tuple[str, str], Collective] = {}
    scatters = _scatter_computations(module)
    for computation, instruction in module.instructions():
        runs = module.multiplicities[computation.name]
        kind = instruction.opcode.removesuffix("-start")
        if not runs or kind not in KINDS:
            continue
        groups = replica_groups(instruction, math.prod(mesh.values()))
        axes = axes_of(groups, mesh)
        size = max(map(len, groups))
        if size < 2 and kind != "collective-permute":
            continue
        chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
        fusion = "async_collective_fusion_config" in instruction.attributes and chain is not None
        collective = Collective(
            "reduce-scatter" if kind == "all-reduce" and computation.name in scatters else kind,
            axes,
            size,
            _payload(computation, instruction, size),
            runs,
            blocking=not (
                fusion or instruction.opcode.endswith("-start") or computation.name in module.async_computations
            ),
        )
        if fusion and chain is not None:
            # Cut into a start, steps inside other fusions and an end: the same collective each time.
            key = chain.group(1), instruction.attribute("channel_id") or ""
            fused[key] = max(fused.get(key, collective), collective, key=lambda each: each.runs)
        else:
            found.append(collective)
    return [*found, *fused.values()]


def bytes_by_kind(found: Sequence[Collective]) -> dict[str, int]:
    """Bytes per chip per execution of the program, for every kind that occurs."""
    return {kind: sum(c.bytes * c.runs for c in found if c.kind == kind) for kind in KINDS}


def bytes_by_axes(found: Sequence[Collective]) -> dict[str, dict[str, int]]:
    """The same by mesh axes ("context", "fsdp x context", ...), then kind."""
    table: dict[str, dict[str, int]] = {}
    for collective in found:
        row = table.setdefault(" x ".join(collective.axes), {})
        row[collective.kind] = row.get(collective.kind, 0) + collective.bytes * collective.runs
    return table


def replica_groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """Which partitions exchange; a permute's pairs are joined into their cycles.

    Understands explicit lists, the iota form `[2,4]<=[4,2]T(1,0)`, the mesh form `mesh['a'=2,'b'=4] {'b'}`, and
    source_target_pairs. No groups means one of all partitions.
    """
    text = instruction.attributes
    if match := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return _cycles([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", match.group(1))])
    start = text.find("replica_groups=")
    if start < 0:
        return [list(range(devices))]
    text = text[start + len("replica_groups=") :]
    if match := _MESH.match(text):
        return _mesh_groups(*match.groups())
    if match := _IOTA.match(text):
        return _iota(*match.groups()).tolist()
    match = re.match(r"\{((?:\{[\d,]*\},?)*)\}", text)
    groups = (
        [[int(i) for i in group.split(",") if i] for group in re.findall(r"\{([\d,]*)\}", match.group(1))]
        if match
        else []
    )
    return groups or [list(range(devices))]


def axes_of(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the coordinates inside groups differ.

    Groups that are not whole lines, planes, ... of the mesh belong to the smallest product of axes that holds them.
    """
    sizes = tuple(mesh.values())
    differing = [False] * len(sizes)
    for group in groups:
        coordinates = np.array(np.unravel_index(np.array(group), sizes))
        for axis, values in enumerate(coordinates):
            differing[axis] |= bool(np.any(values != values[0]))
    return tuple(name for name, differs in zip(mesh, differing, strict=True) if differs) or ("none",)


def _payload(computation: Computation, instruction: Instruction, group: int) -> int:
    operands = sum(shape.bytes for name in instruction.operands for shape in computation.instructions[name].shapes)
    if instruction.opcode == "all-gather" or instruction.opcode == "all-gather-start":
        return operands * group
    return operands


def _scatter_computations(module: Module) -> set[str]:
    return {name for name in module.computations if is_reduce_scatter(name)}


def is_reduce_scatter(computation: str) -> bool:
    """Whether a computation of this name is a fusion in which every chip keeps its slice of an all-reduce (TPU)."""
    return computation.startswith(("all-reduce-scatter", "all_reduce_scatter"))


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    ids = _device_ids(device_ids, math.prod(sizes.values())).reshape(tuple(sizes.values()))
    # An axis may be named in part: 'a':(2)4 is the part of size 4 after the first 2.
    parts: list[tuple[str, int]] = []
    wanted: list[tuple[str, int]] = []
    named = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    for name, size in sizes.items():
        pieces = sorted((int(before), int(length)) for other, before, length in named if other == name and length)
        done = 1
        for before, length in pieces:
            if before > done:
                parts.append((f"{name}:{done}", before // done))
            parts.append((f"{name}:{before}", length))
            done = before * length
        if done < size:
            parts.append((f"{name}:{done}", size // done))
    for name, before, length in named:
        wanted += [
            part for part in parts if part[0].startswith(f"{name}:") and (not length or part[0] == f"{name}:{before}")
        ]
    order = [index for index, part in enumerate(parts) if part not in wanted] + [parts.index(part) for part in wanted]
    group = math.prod(size for _, size in wanted)
    return ids.reshape([size for _, size in parts]).transpose(order).reshape(-1, group).tolist()


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    if match := _IOTA.match(text):
        return _iota(*match.groups()).reshape(-1)
    if match := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(str(count), match.group(1), match.group(2)).reshape(-1)
    return np.array([int(number) for number in re.findall(r"\d+", text)])


def _iota(shape: str, source: str, permutation: str | None) -> np.ndarray:
    """[shape]<=[source]T(permutation): count up, in the source's shape, transpose, reshape."""
    dimensions = [int(size) for size in source.split(",")]
    ids = np.arange(math.prod(dimensions)).reshape(dimensions)
    if permutation:
        ids = ids.transpose([int(axis) for axis in permutation.split(",")])
    return ids.reshape([int(size) for size in shape.split(",")])


def _cycles(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Connected sets of a permutation's sources and targets, those of one member left out."""
    parent: dict[int, int] = {}

    def find(node: int) -> int:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for source, target in pairs:
        parent[find(source)] = find(target)
    groups: dict[int, list[int]] = {}
    for node in sorted(parent):
        groups.setdefault(find(node), []).append(node)
    return list(groups.values()) or [[0]]
