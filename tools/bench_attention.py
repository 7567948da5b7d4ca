"""Attention in all its forms on one machine: how exact, how fast, how evenly spread, how much memory. Needs no TPU.

python tools/bench_attention.py [--length 4096] [--devices 8] [--block 128] [--repeats 5] ...

Runs, on fake CPU devices that share the machine's cores, the same row dense and blockwise on one device, and gathered
and as a ring over all of them, each in the zigzag and the contiguous layout. In the table, per line:

    out dq dk dv   largest difference to dense float32, relative to the largest entry there; of both rows below
    1 doc, 8 docs  time of forward and backward, relative to the first line's with one document; the lines take turns,
                   and the median counts. The row is one document, or eight equal ones, whose blocks of scores across
                   documents are skipped
    blocks         of scores that a device visits for the row of one document, mean over the devices
    max/mean       of the busiest device: what the others wait for on a real mesh, where devices do not share cores
    temporaries    of the compiled program, per device

Exits with 1 if a difference is above ERROR_BOUND, if the zigzag layout gives a device more than BALANCE_BOUND of the
mean, or if eight documents visit more than PRUNING_BOUND of the blocks that one document does.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

ERROR_BOUND = 1e-5
BALANCE_BOUND = 1.05
PRUNING_BOUND = 0.2  # of the causal blocks; eight equal documents need an eighth, and their own diagonals
DOCUMENTS = 8
RESULTS = ("out", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table: how to compute."""

    name: str
    backend: str
    strategy: str = "auto"
    layout: str = "contiguous"
    sharded: bool = False
    pruned: bool = True


LINES = (
    Line("dense, one device", "dense"),
    Line("blockwise, one device", "blockwise"),
    Line("... nothing skipped", "blockwise", pruned=False),
    *(
        Line(f"{strategy}, {layout}", "blockwise", strategy, layout, sharded=True)
        for strategy in ("gather", "ring")
        for layout in ("zigzag", "contiguous")
    ),
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A line, compiled.

    Attributes:
        run: (number of documents) -> results on the devices.
        restore: the same in the order of the row, on the host.
        temporaries: bytes per device.
    """

    run: Callable[[int], Any]
    restore: Callable[[Any], list[Any]]
    temporaries: int


def main() -> int:
    options = parse()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    from vibethinker_jax.errors import UserError

    try:
        return run(options)
    except UserError as error:
        print(f"bench_attention: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    import numpy as np

    prepared = {line.name: prepare(line, options) for line in LINES}
    found = {name: [each.restore(each.run(d)) for d in (1, DOCUMENTS)] for name, each in prepared.items()}
    differences = {
        name: [
            max(float(np.max(np.abs(a[place] - b[place])) / np.max(np.abs(b[place]))) for a, b in pairs)
            for place in range(len(RESULTS))
        ]
        for name, pairs in ((name, list(zip(each, found[LINES[0].name], strict=True))) for name, each in found.items())
    }
    seconds = take_turns(prepared, options.repeats)
    balance = {line.name: device_blocks(line, options, 1) for line in LINES}
    print_table(differences, seconds, balance, prepared)
    return 1 if print_bounds(differences, balance, options) else 0


def prepare(line: Line, options: argparse.Namespace) -> Prepared:
    """Compiles forward and backward, and places the arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from vibethinker_jax.attention.attend import AttentionConfig, attend
    from vibethinker_jax.attention.zigzag import inverse_order, zigzag_order
    from vibethinker_jax.parallel.mesh import make_mesh
    from vibethinker_jax.parallel.rules import UNPLACED, Placement

    placement = Placement(make_mesh(context=options.devices)) if line.sharded else UNPLACED
    order = zigzag_order(options.length, options.devices if line.layout == "zigzag" else 1)
    config = AttentionConfig(line.backend, line.strategy, options.block, options.block)

    def both_passes(q, k, v, d_out, segment_ids, positions):
        def forward(q, k, v):
            return attend(q, k, v, segment_ids, positions, placement=placement, config=config)

        out, derivative = jax.vjp(forward, q, k, v)
        return out, *derivative(d_out)

    def place(array: np.ndarray) -> jax.Array:
        ordered = array[:, order]
        axes = ("batch", "sequence", *[None] * (array.ndim - 2))
        return (
            jnp.asarray(ordered)
            if placement.mesh is None
            else jax.device_put(ordered, placement.sharding(axes, ordered.shape))
        )

    generator = np.random.default_rng(options.seed)
    widths = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    shapes = [(1, options.length, heads, options.head_dim) for heads in widths]
    q, k, v, d_out = (generator.standard_normal(shape, np.float32) for shape in shapes)
    given = {
        documents: [place(x) for x in (q, k, v, d_out, *row(options.length, documents))] for documents in (1, DOCUMENTS)
    }
    with contextlib.nullcontext() if line.pruned else visit_everything():
        compiled = jax.jit(both_passes).lower(*given[1]).compile()
    inverse = inverse_order(order)
    return Prepared(
        run=lambda documents: jax.block_until_ready(compiled(*given[documents])),
        restore=lambda arrays: [np.asarray(array)[:, inverse] for array in arrays],
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
    )


def row(length: int, documents: int) -> tuple[Any, Any]:
    """(segment ids, positions) of a row of equal documents, int32[1, length]."""
    import numpy as np

    places = np.arange(length, dtype=np.int32)[None]
    return places // (length // documents) + 1, places % (length // documents)


@contextlib.contextmanager
def visit_everything() -> Iterator[None]:
    """Block maps of the blockwise backend that leave nothing out."""
    import jax.numpy as jnp

    from vibethinker_jax.attention import blockwise
    from vibethinker_jax.attention.visibility import Queries

    def visible_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
        def full_map(queries: Queries, keys: Any, *blocks: int) -> Any:
            everything = Queries(jnp.zeros_like(queries.low), jnp.ones_like(queries.high))
            return original(everything, jnp.zeros_like(keys), *blocks)

        return full_map

    with contextlib.ExitStack() as stack:
        for name in ("block_map", "transposed_block_map"):
            full_map = visible_everywhere(getattr(blockwise, name))
            stack.enter_context(mock.patch.object(blockwise, name, full_map))
        yield


def take_turns(prepared: Mapping[str, Prepared], repeats: int) -> dict[str, list[float]]:
    """Median seconds of each line for one document and for eight."""
    seconds: dict[str, list[list[float]]] = {name: [[], []] for name in prepared}
    for _ in range(repeats):
        for name, line in prepared.items():
            for place, documents in enumerate((1, DOCUMENTS)):
                began = time.perf_counter()
                line.run(documents)
                seconds[name][place].append(time.perf_counter() - began)
    return {name: [statistics.median(each) for each in both] for name, both in seconds.items()}


def device_blocks(line: Line, options: argparse.Namespace, documents: int) -> list[int]:
    """Blocks of scores that each device visits in a pass; all of them where nothing is skipped."""
    import numpy as np

    from vibethinker_jax.attention.block_map import block_map
    from vibethinker_jax.attention.visibility import key_codes, query_bounds
    from vibethinker_jax.attention.zigzag import zigzag_order

    if line.backend == "dense" or not line.pruned:
        return [(options.length // options.block) ** 2]
    shards = options.devices if line.sharded else 1
    order = zigzag_order(options.length, shards if line.layout == "zigzag" else 1)
    # A row of the batch per device: its queries against all keys. A ring visits the same blocks, a shard at a time.
    segment_ids, positions = (x[:, order] for x in row(options.length, documents))
    queries = query_bounds(segment_ids.reshape(shards, -1), positions.reshape(shards, -1), options.length)
    keys = key_codes(*(np.repeat(x, shards, axis=0) for x in (segment_ids, positions)), options.length)
    return [int(count) for count in block_map(queries, keys, options.block, options.block).counts.sum(-1)]


def print_table(
    differences: Mapping[str, list[float]],
    seconds: Mapping[str, list[float]],
    balance: Mapping[str, list[int]],
    prepared: Mapping[str, Prepared],
) -> None:
    errors = "".join(f"{name:>9}" for name in RESULTS)
    print(f"{'':24}{errors}{'1 doc':>8}{f'{DOCUMENTS} docs':>8}{'blocks':>8}{'max/mean':>10}{'temporaries':>14}")
    first = seconds[LINES[0].name][0]
    for name, blocks in balance.items():
        cells = "".join(f"{each:9.1e}" for each in differences[name])
        cells += "".join(f"{each / first:8.2f}" for each in seconds[name])
        mean = statistics.mean(blocks)
        cells += f"{mean:8.1f}{max(blocks) / mean:10.3f}{prepared[name].temporaries / 2**20:10.1f} MiB"
        print(f"{name:24}{cells}")
    print(f"1.00 is {first:.3f} s")


def print_bounds(
    differences: Mapping[str, list[float]], balance: Mapping[str, list[int]], options: argparse.Namespace
) -> bool:
    """Prints a line per bound; True if one is exceeded."""
    blockwise = LINES[1]
    one, eight = (sum(device_blocks(blockwise, options, documents)) for documents in (1, DOCUMENTS))
    square = (options.length // options.block) ** 2
    zigzag = [balance[line.name] for line in LINES if line.layout == "zigzag"]
    bounds = (
        ("largest relative difference to dense", max(max(each) for each in differences.values()), ERROR_BOUND),
        ("busiest device over mean, zigzag", max(max(b) / statistics.mean(b) for b in zigzag), BALANCE_BOUND),
        (f"blocks of {DOCUMENTS} documents ({eight}) over causal blocks of one ({one})", eight / one, PRUNING_BOUND),
    )
    for text, value, bound in bounds:
        print(f"{'ok' if value <= bound else 'FAILED':6}  {text}: {value:.3g}, at most {bound:.3g}")
    shares = f"one document {one / square:.3f}, {DOCUMENTS} documents {eight / square:.3f}"
    print(f"        of all {square} blocks of the square: {shares}")
    return any(not value <= bound for _, value, bound in bounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "length": (4096, "tokens of the row"),
        "devices": (8, "fake devices"),
        "heads": (4, "query heads"),
        "kv-heads": (2, "KV heads"),
        "head-dim": (32, "width of a head"),
        "block": (128, "tokens of a block of queries, and of keys"),
        "repeats": (5, "timed runs of each line"),
        "seed": (0, "of the random numbers"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    options = parser.parse_args()
    if options.length % (2 * options.devices * options.block) or options.length % (DOCUMENTS * options.block):
        parser.error(
            f"--length {options.length}: use a multiple of 2 x devices x block = "
            f"{2 * options.devices * options.block} and of {DOCUMENTS} x block = {DOCUMENTS * options.block}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
