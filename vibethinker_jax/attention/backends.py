"""The attention backends: pairs of pure functions on the arrays of one device.

With q `[batch, heads, queries, head_dim]`, k and v `[batch, kv_heads, keys, head_dim]` (float32 or bfloat16; query head
h reads KV head h // (heads / kv_heads), K/V are never repeated) and who sees whom as in `visibility`:

    forward(q, k, v, queries, keys, *, blocks) -> (out, log_sum_exp)
    backward(q, k, v, queries, keys, d_out, log_sum_exp, delta, *, blocks) -> (dq, dk, dv)

All results are float32. Matrix products take operands of the input dtype and accumulate in float32. `backward` takes
the log-sum-exp of each query over all its keys, wherever they are, so a part of the keys yields its part of the
gradients.
`gather` and `ring` turn such a pair into another whose arrays are shards of the sequence.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax

from vibethinker_jax.attention import blockwise, dense
from vibethinker_jax.attention.block_map import Blocks
from vibethinker_jax.errors import UserError

BACKENDS = ("dense", "blockwise", "pallas")
# Up to here a CPU is faster with the whole score matrix than with loops over its blocks, and compiles it sooner.
DENSE_LENGTH = 1024
_TPU_LANES = 128


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    forward, backward: as in the module's description.
    default_blocks: where the configuration leaves block sizes open.
    """

    name: str
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    default_blocks: Blocks


def get_backend(name: str, platform: str) -> Backend:
    """The backend of this name.

    Args:
        name: one of BACKENDS.
        platform: of the devices that will run it; off "tpu", the kernels of "pallas" are interpreted.
    """
    if name == "dense":
        return Backend(name, dense.forward, dense.backward, Blocks(512, 512))
    if name == "blockwise":
        return Backend(name, blockwise.forward, blockwise.backward, Blocks(512, 512))
    if name == "pallas":
        # Imported where it is used: Pallas takes a second to import and the other backends do not need it.
        from vibethinker_jax.attention import pallas_backward, pallas_common, pallas_forward

        interpret = platform != "tpu"
        return Backend(
            name,
            functools.partial(pallas_forward.forward, interpret=interpret),
            functools.partial(pallas_backward.backward, interpret=interpret),
            pallas_common.DEFAULT_BLOCKS,
        )
    raise UserError(f"attention backend is {name!r}; choose one of auto, {', '.join(BACKENDS)}")


def choose_backend(name: str, platform: str, length: int, head_dim: int, *, sharded: bool = False) -> str:
    """The name of the backend to use: `name` itself unless it is "auto".

    Args:
        platform: of the devices that will run it.
        length: tokens of a whole row.
        sharded: whether the sequence is sharded over devices.
    """
    if name != "auto":
        return name
    if platform == "tpu" and head_dim % (_TPU_LANES // 2) == 0:
        return "pallas"
    return "dense" if length <= DENSE_LENGTH and not sharded else "blockwise"


def resolve_blocks(block_q: int, block_kv: int, default: Blocks, queries: int, keys: int) -> Blocks:
    """Block sizes for a call: the configured ones, or where 0 the default, cut to the sequences.

    Args:
        queries, keys: lengths of the sequences of one call of the backend.
    """
    # A default larger than the sequence would only add padding; what was asked for is kept.
    return Blocks(block_q or min(default.q, _lanes(queries)), block_kv or min(default.kv, _lanes(keys)))


def _lanes(length: int) -> int:
    """Rounds up to whole TPU lanes, which kernels want of a block."""
    return -(-length // _TPU_LANES) * _TPU_LANES
