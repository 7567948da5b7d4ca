"""Which context-parallel strategy pays: a cost model of one layer, decided before anything runs.

Both strategies move the same bytes of K/V over the links and do the same matrix products. They differ in two ways:

- `ring` merges float32 outputs once per hop (about 12 bytes of memory traffic per element and hop). With few KV heads
  that costs more than the all-gather, whose transfer is also partly hidden and which waits for its neighbours once
  instead of once per hop. So `gather` is faster wherever it fits.
- `gather` holds the K/V of the whole row on every device, and in the backward pass the float32 gradients of all of it,
  while `ring` holds a few shards. That grows with the row, not with the row per device.

Hence the rule: `gather` within a budget of memory, `ring` beyond.
"""

# One layer's buffers live at a time, so the budget is spent once: a sixteenth of the smallest chip's 16 GiB.
GATHER_BUDGET_BYTES = 1 << 30
STRATEGIES = ("gather", "ring")
_FLOAT32_BYTES = 4


def gathered_bytes(batch: int, length: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that `gather` holds per device for one layer, at its peak: K, V and the float32 dK, dV of whole rows.

    64 Ki tokens with 2 KV heads of width 128 in bfloat16: 64 MiB of K/V and 128 MiB of gradients.

    Args:
        batch: rows per device.
        length: tokens of a whole row.
        kv_heads: per device.
        itemsize: bytes of one element of K or V.
    """
    return batch * length * kv_heads * head_dim * 2 * (itemsize + _FLOAT32_BYTES)


def choose_strategy(
    batch: int, length: int, kv_heads: int, head_dim: int, itemsize: int, budget_bytes: int = GATHER_BUDGET_BYTES
) -> str:
    """ "gather" where `gathered_bytes` (same arguments) fits the budget, else "ring"."""
    fits = gathered_bytes(batch, length, kv_heads, head_dim, itemsize) <= budget_bytes
    return "gather" if fits else "ring"
