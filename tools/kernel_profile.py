"""What the attention kernels cost on a TPU, read from the compiler's schedule: needs libtpu, but no TPU.

python tools/kernel_profile.py --topology v5e:2x2 [--kernels forward backward stock] [--blocks 512x1024 ...] [--json]

Compiles each kernel ahead of time (16 query heads, 2 KV heads of 128, 4,096 queries, 65,536 keys, bfloat16) and counts
VLIW bundles, each at least a cycle, in the final schedule of its program:

    masked, unmasked   the code of one block of scores, from its branch to the branch's target
    control            the rest of a turn of the grid's loop: index arithmetic, starting and awaiting copies
    rows               branches taken once per row of blocks or less often: clearing sums, writing results
    whole              the whole program, less its unmasked code where there is masked code too

`stock` is jax's splash attention (forward; dK and dV; dQ) with segment ids, 512 keys at a time. `bound` is the time of
the matmuls at the chip's peak; a schedule can be shorter, since it leaves out the wait for a busy matrix unit. `share`
is bound / masked. `cost` is control plus the larger of masked and bound, per 512 x 1,024 scores: the kernels' default
blocks (attention/pallas_common.py) are the cheapest.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
HEADS, KV_HEADS, HEAD_DIM, QUERIES, KEYS = 16, 2, 128, 4096, 65536
BLOCKS = ("512x512", "512x1024", "1024x512", "1024x1024", "512x2048", "1024x2048")
STOCK_BLOCKS = "512x1024"
# Kernel: the name of its program, its matmuls.
PROGRAMS = {
    "forward": {"attention_forward": ("forward", 2)},
    "backward": {"attention_backward": ("backward", 5)},
    "stock": {
        "splash_mqa_fwd": ("stock forward", 2),
        "splash_mqa_dkv": ("stock dK, dV", 4),
        "splash_mqa_dq": ("stock dQ", 3),
    },
}
# bfloat16 FLOPs of one core per cycle at its peak. jax/_src/pallas/mosaic/tpu_info.py has the matrix units (v5e, v5p:
# 4 of 128 x 128; v6e: 2 of 256 x 256) and the peaks per second; v6e's needs two rows per cycle at 1.75 GHz. A head of
# 128 fills half of its units in all matmuls but the one of dQ.
FLOPS_PER_CYCLE = {"v5e": 4 * 128 * 128 * 2, "v5p": 4 * 128 * 128 * 2, "v6e": 2 * 256 * 256 * 2 * 2}


@dataclasses.dataclass(frozen=True)
class Profile:
    """One line of the table."""

    kernel: str
    block_q: int
    block_kv: int
    matmuls: int
    masked: int
    unmasked: int
    control: int
    rows: int
    whole: int
    bound: int
    share: float
    cost: int


@dataclasses.dataclass(frozen=True)
class Branch:
    """Code that a condition guards, as places of bundles in the program."""

    start: int
    end: int
    matmuls: int
    comparisons: int

    @property
    def bundles(self) -> int:
        return self.end - self.start

    def holds(self, other: "Branch") -> bool:
        return self != other and self.start <= other.start and other.end <= self.end


def main() -> int:
    options = parse()
    if options.compile:
        compile_kernel(options.topology, options.compile, *block_sizes(options.blocks[0]))
        return 0
    profiles = []
    for kernel in options.kernels:
        for blocks in options.blocks if kernel != "stock" else [STOCK_BLOCKS]:
            for profile in measure(options.topology, kernel, blocks):
                if not options.json:
                    print(table_row(profile) if profiles else f"{table_head()}\n{table_row(profile)}", flush=True)
                profiles.append(profile)
    if options.json:
        print(json.dumps({"topology": options.topology, "profiles": [dataclasses.asdict(p) for p in profiles]}))
        return 0
    for kernel in set(options.kernels) - {"stock"}:
        best = min((p for p in profiles if p.kernel == kernel), key=lambda p: p.cost)
        print(f"cheapest {kernel}: {best.block_q} queries x {best.block_kv} keys")
    return 0


def measure(topology: str, kernel: str, blocks: str) -> list[Profile]:
    """Compiles a kernel in a process of its own, since the compiler takes its dump directory when it is loaded."""
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, __file__, "--compile", kernel, "--topology", topology, "--blocks", blocks]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{kernel} {blocks} does not compile for {topology}:\n{done.stderr[-3000:]}")
        profiles = []
        for program, (name, matmuls) in PROGRAMS[kernel].items():
            [path] = (p for p in pathlib.Path(dump).glob(f"*-{program}*final_bundles.txt") if "analysis" not in p.name)
            profiles.append(profile(path.read_text(errors="replace"), topology, name, matmuls, *block_sizes(blocks)))
        return profiles


def profile(schedule: str, topology: str, kernel: str, matmuls: int, block_q: int, block_kv: int) -> Profile:
    """Reads a schedule: the text of a `*-final_bundles.txt`."""
    bundles, (loop_start, loop_end), branches = read_schedule(schedule)
    steps = [b for b in branches if b.matmuls and not any(b.holds(other) for other in branches if other.matmuls)]
    # The masked path is the one that compares; a kernel without two paths has only that.
    masked, unmasked = max(steps, key=lambda b: b.comparisons), min(steps, key=lambda b: b.comparisons)
    others = [b for b in branches if not b.matmuls and loop_start <= b.start and b.end <= loop_end]
    # Branches inside a step or inside each other are counted with what holds them.
    rows = sum(b.bundles for b in others if not any(c.holds(b) for c in [*others, *steps]))
    control = loop_end - loop_start - rows - sum(b.bundles for b in steps)
    bound = matmuls * 2 * block_q * block_kv * HEAD_DIM // FLOPS_PER_CYCLE[topology.split(":")[0]]
    return Profile(
        kernel=kernel,
        block_q=block_q,
        block_kv=block_kv,
        matmuls=matmuls,
        masked=masked.bundles,
        unmasked=unmasked.bundles,
        control=control,
        rows=rows,
        whole=bundles - (unmasked.bundles if unmasked != masked else 0),
        bound=bound,
        share=round(bound / masked.bundles, 3),
        cost=round((control + max(masked.bundles, bound)) * 512 * 1024 / (block_q * block_kv)),
    )


def read_schedule(schedule: str) -> tuple[int, tuple[int, int], list[Branch]]:
    """(bundles, extent of the outermost loop, forward branches) of a program."""
    lines, targets = [], {}
    for line in schedule.splitlines():
        if re.match(r"\s*(0|0x[0-9a-f]+)\s+(\w\w)?:", line):
            lines.append("")
        if not lines:
            continue
        lines[-1] += line
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            targets.setdefault(region, len(lines) - 1)
    branches, loop = [], (0, 0)
    for start, line in enumerate(lines):
        for region in re.findall(r"sbr\.rel \([^)]*\) target = \$region(\d+)", line):
            end = targets[region]
            if end > start:
                inside = lines[start:end]
                counts = (sum(len(re.findall(name, text)) for text in inside) for name in ("vmatmul", r"= vcmp"))
                branches.append(Branch(start, end, *counts))
            else:
                loop = max(loop, (end, start + 1), key=lambda extent: extent[1] - extent[0])
    return len(lines), loop, branches


def compile_kernel(topology: str, kernel: str, block_q: int, block_kv: int) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]

    def array(*shape: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    if kernel == "stock":
        function, arguments = stock_gradients(block_q, block_kv, array)
    else:
        function, arguments = our_kernel(kernel, block_q, block_kv, array)
    jax.jit(function).lower(*arguments).compile()


def our_kernel(kernel, block_q, block_kv, array):
    """(function, shapes of its arguments) of the forward or backward kernel."""
    import jax.numpy as jnp

    from vibethinker_jax.attention.block_map import Blocks
    from vibethinker_jax.attention.pallas_backward import backward
    from vibethinker_jax.attention.pallas_forward import forward
    from vibethinker_jax.attention.visibility import Queries

    blocks = Blocks(block_q, block_kv)
    bounds = Queries(*[array(1, QUERIES, dtype=jnp.int32)] * 2)
    q, kv, codes = (
        array(1, HEADS, QUERIES, HEAD_DIM),
        array(1, KV_HEADS, KEYS, HEAD_DIM),
        array(1, KEYS, dtype=jnp.int32),
    )
    if kernel == "forward":
        return lambda *operands: forward(*operands, blocks=blocks), (q, kv, kv, bounds, codes)
    statistic = array(1, HEADS, QUERIES, dtype=jnp.float32)
    return lambda *operands: backward(*operands, blocks=blocks), (q, kv, kv, bounds, codes, q, statistic, statistic)


def stock_gradients(block_q, block_kv, array):
    """(function, shapes of its arguments) of the gradients of jax's splash attention; long enough to have a grid."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    heads = HEADS // KV_HEADS
    mask = splash_attention_mask.CausalMask((QUERIES, QUERIES))
    sizes = {
        f"{name}{phase}": size
        for name, size in (("block_q", block_q), ("block_kv", block_kv))
        for phase in ("", "_dkv", "_dq")
    }
    attention = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**sizes, block_kv_compute=512, block_kv_dkv_compute=512),
        head_shards=1,
        q_seq_shards=1,
    )

    def loss(q, k, v, segment_ids, weights):
        ids = splash_attention_kernel.SegmentIds(segment_ids, segment_ids)
        return jnp.sum(attention(q, k, v, ids).astype(jnp.float32) * weights)

    q, kv = array(heads, QUERIES, HEAD_DIM), array(QUERIES, HEAD_DIM)
    return jax.grad(loss, argnums=(0, 1, 2)), (q, kv, kv, array(QUERIES, dtype=jnp.int32), q)


def table_head() -> str:
    return "  ".join(f"{f.name:>{column_width(f.name)}}" for f in dataclasses.fields(Profile))


def table_row(profile: Profile) -> str:
    return "  ".join(f"{value:>{column_width(name)}}" for name, value in dataclasses.asdict(profile).items())


def column_width(name: str) -> int:
    return 14 if name == "kernel" else max(6, len(name))


def block_sizes(blocks: str) -> tuple[int, int]:
    block_q, block_kv = blocks.split("x")
    return int(block_q), int(block_kv)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x2", help="v5e:2x2, v5p:2x2x1, v6e:2x2 (default v5e:2x2)")
    parser.add_argument("--kernels", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS), help="queries x keys (default: several)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--compile", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.topology.split(":")[0] not in FLOPS_PER_CYCLE:
        parser.error(f"topology {options.topology}: know the chips {', '.join(FLOPS_PER_CYCLE)}")
    if bad := [blocks for blocks in options.blocks if not re.fullmatch(r"\d+x\d+", blocks)]:
        parser.error(f"blocks {bad[0]}: write queries x keys, like 512x1024")
    return options


if __name__ == "__main__":
    sys.exit(main())
