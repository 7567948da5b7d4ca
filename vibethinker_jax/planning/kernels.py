"""FLOPs of the attention kernels, which the compiler's text does not show: they are custom calls to it.

Counted for one document that fills the row, as a row of packed documents costs less: kernels skip blocks of scores in
which nothing is visible.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vibethinker_jax.attention.backends import choose_backend, get_backend, resolve_blocks
from vibethinker_jax.attention.cost import choose_strategy
from vibethinker_jax.attention.zigzag import zigzag_order
from vibethinker_jax.planning.hlo import Shape
from vibethinker_jax.training.forward import PackedForward

# Matrix products per block of scores: forward QK, PV; backward QK, dO V, and one each for dQ, dK, dV.
PRODUCTS = {"attention_forward": 2, "attention_backward": 5}

# FLOPs of one call of a kernel, from the shapes of its operands.
KernelFlops = Callable[[Sequence[Shape]], float]


def active_pairs(length: int, shards: int, block_q: int, block_kv: int, layout: str = "zigzag") -> int:
    """Blocks of scores that the busiest device computes, of one row that is one causal document.

    Args:
        length: tokens of the row.
        shards: devices that share its queries; each meets all keys.
        block_q, block_kv: tokens per block; the last of each may be shorter.
        layout: order of the tokens on the shards, "zigzag" or "contiguous".
    """
    order = zigzag_order(length, shards) if layout == "zigzag" else np.arange(length)
    queries = order.reshape(shards, -1)
    last_query = np.maximum.reduceat(queries, np.arange(0, queries.shape[1], block_q), axis=1)
    first_key = np.minimum.reduceat(order, np.arange(0, length, block_kv))
    return int(np.max(np.sum(first_key <= last_query[:, :, None], axis=(1, 2))))


def attention_flops(pairs: int, block_q: int, block_kv: int, head_dim: int, heads: int, products: int) -> float:
    """2 FLOPs per multiply-add of every product of every active block, over heads."""
    return 2.0 * products * pairs * block_q * block_kv * head_dim * heads


def attention_kernels(
    *, length: int, shards: int, head_dim: int, blocks: tuple[int, int], layout: str
) -> Mapping[str, KernelFlops]:
    """FLOPs per call of the kernels of a training step, by a part of their names.

    Args:
        length: tokens of a row over all shards.
        shards: size of the mesh's context axis.
        blocks: tokens of queries and keys per block.
        layout: as in `active_pairs`.
    """
    pairs = active_pairs(length, shards, *blocks, layout)

    def kernel(products: int) -> KernelFlops:
        def flops(operands: Sequence[Shape]) -> float:
            arrays = [s.dimensions for s in operands if len(s.dimensions) == 4 and s.dimensions[-1] == head_dim]
            (rows, heads, queries, _), (*_, keys, _) = arrays[0], arrays[-1]  # queries come first, values last
            # A call may have part of the device's queries, and a ring's has the keys of one shard only.
            share = min(1.0, queries * shards / length) * min(1.0, keys / length)
            return rows * share * attention_flops(pairs, *blocks, head_dim, heads, products)

        return flops

    return {name: kernel(products) for name, products in PRODUCTS.items()}


def training_kernels(forward: PackedForward, rows: int, length: int, itemsize: int) -> Mapping[str, KernelFlops]:
    """`attention_kernels` of a training step, with what its attention resolves "auto" to; none without kernels.

    Args:
        forward: how the step runs the model, on a TPU mesh.
        rows: of a micro-batch over all devices.
        length: tokens of a row.
        itemsize: bytes of one activation.
    """
    model, placement, attention = forward.model, forward.placement, forward.attention
    shards, tensor = placement.size("context"), placement.size("tensor")
    backend = choose_backend(attention.backend, "tpu", length, model.head_dim, sharded=shards > 1)
    if backend != "pallas":
        return {}
    local_rows = rows // placement.size("replica", "fsdp")
    kv_heads = model.num_kv_heads // tensor if model.num_kv_heads % tensor == 0 else 1
    strategy = attention.strategy
    if strategy == "auto":
        strategy = choose_strategy(local_rows, length, kv_heads, model.head_dim, itemsize)
    local = length // shards
    blocks = resolve_blocks(
        attention.block_q,
        attention.block_kv,
        get_backend(backend, "tpu").default_blocks,
        queries=local,
        keys=local if strategy == "ring" else length,
    )
    return attention_kernels(
        length=length,
        shards=shards,
        head_dim=model.head_dim,
        blocks=(blocks.q, blocks.kv),
        layout=forward.layout,
    )
