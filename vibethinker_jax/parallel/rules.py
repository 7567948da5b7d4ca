"""Where arrays live: logical axis names mapped to mesh axes, in one place.

The model and the steps name the dimensions of their arrays ("embed", "batch", ...); nothing else in the code base
names a mesh axis for a parameter or an activation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vibethinker_jax.errors import UserError

MeshAxes = tuple[str, ...]

# Logical axis -> mesh axes, major first. Parameters and optimizer state are sharded over fsdp x context (ZeRO-3) and
# tensor; activations over batch and sequence. `replica` never shards a parameter: slices hold copies.
RULES: Mapping[str, MeshAxes] = {
    # activations
    "batch": ("replica", "fsdp"),
    "sequence": ("context",),
    "slots": ("replica", "fsdp", "context"),  # of a decoding engine: one token each, so that `context` has no other use
    # parameters
    "layers": (),
    "embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("context", "tensor"),
    "table_embed": ("fsdp",),
}
# Axes that are replicated where their size does not divide: 2 KV heads on tensor 4 is a normal setting.
REPLICATE_IF_INDIVISIBLE = frozenset({"kv_heads"})
# Below this, an array that a mesh cannot divide is replicated instead of refused (bytes of float32).
SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Placement:
    """A mesh and the rules that place arrays on it. `Placement(None)` leaves every array where it is."""

    mesh: Mesh | None

    def size(self, *mesh_axes: str) -> int:
        """Product of the sizes of mesh axes; 1 without a mesh."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in mesh_axes)

    def spec(self, axes: Sequence[str | None], shape: Sequence[int], *, strict: bool = True) -> PartitionSpec:
        """The partition of an array with these logical axes; a dimension that does not divide is replicated.

        Args:
            axes: a logical axis, or None for a dimension that is never sharded, per dimension.
            shape: of the array.
            strict: refuse to replicate a dimension of a large array (what parameters want).

        Raises:
            UserError: `strict`, and a large array has a dimension that its mesh axes do not divide.
        """
        if len(axes) != len(shape):
            raise ValueError(f"{len(axes)} logical axes {tuple(axes)} for an array of shape {tuple(shape)}")
        parts: list[Any] = []
        for axis, length in zip(axes, shape, strict=True):
            mesh_axes = () if axis is None else RULES[axis]
            divides = length % self.size(*mesh_axes) == 0
            if strict and not divides and axis not in REPLICATE_IF_INDIVISIBLE and 4 * math.prod(shape) > SMALL_BYTES:
                raise UserError(
                    f"mesh: {' x '.join(mesh_axes)} = {self.size(*mesh_axes)} does not divide axis '{axis}' of length "
                    f"{length} (array of shape {tuple(shape)}); choose mesh sizes that do"
                )
            parts.append((mesh_axes if len(mesh_axes) > 1 else mesh_axes[0]) if mesh_axes and divides else None)
        return PartitionSpec(*parts)

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding | None:
        """`spec` on the mesh; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.spec(axes, shape))

    def replicated(self) -> NamedSharding | None:
        """A whole copy on every device; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, array: jax.Array, *axes: str | None) -> jax.Array:
        """Tells the compiler where an intermediate array lives.

        A dimension that does not divide stays whole (one prompt being prefilled has batch 1); the training steps
        check that theirs do divide.
        """
        if self.mesh is None:
            return array
        spec = self.spec(axes, array.shape, strict=False)
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))


UNPLACED = Placement(None)


def placement_table(placement: Placement, named: Mapping[str, tuple[Sequence[str | None], Sequence[int]]]) -> str:
    """A table for people: array, shape, logical axes, mesh axes and float32 bytes per device.

    Args:
        placement: where the arrays go.
        named: logical axes and shape per array name.
    """
    rows = [("array", "shape", "logical axes", "mesh axes", "MiB/device")]
    for name, (axes, shape) in named.items():
        spec = placement.spec(axes, shape)
        used = [axis for part in spec for axis in ((part,) if isinstance(part, str) else part or ())]
        mebibytes = 4 * math.prod(shape) / placement.size(*used) / 2**20
        text = ", ".join("-" if part is None else part if isinstance(part, str) else "+".join(part) for part in spec)
        rows.append(
            (name, "x".join(map(str, shape)), ", ".join(axis or "-" for axis in axes), text, f"{mebibytes:.2f}")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
