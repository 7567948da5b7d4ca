"""Estimated time of a program: every instruction takes as long as its FLOPs or its HBM traffic need.

An estimate, never a measurement: it takes the chip's published peaks as reached, counts no latency and no element-wise
work, and lets asynchronous collectives hide behind computation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vibethinker_jax.planning.chips import Chip
from vibethinker_jax.planning.collectives import Collective
from vibethinker_jax.planning.flops import instruction_flops
from vibethinker_jax.planning.hlo import Computation, Instruction, Module
from vibethinker_jax.planning.kernels import KernelFlops

HBM, HOST = 0, 5  # memory spaces of the TPU compiler's layouts

# What moves no bytes by itself: names and control flow, whose computations count; what ends in "-done" ends what
# counted when it started.
FREE = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "iota",
        "partition-id", "replica-id", "after-all", "async-start", "async-update", "opt-barrier",
    }
)  # fmt: skip
SLICES = ("dynamic-slice", "gather", "slice")
ASYNCHRONOUS_SLICES = tuple(f"{opcode}-start" for opcode in SLICES)


@dataclass(frozen=True)
class Estimate:
    """Seconds of one execution; estimates all.

    Attributes:
        compute: FLOPs at the chip's peak.
        hbm: HBM traffic at the chip's bandwidth.
        host: traffic with host memory at the bandwidth to it.
        collectives: bytes sent, over the links of one torus axis in both directions.
        total: per instruction the larger of FLOPs and HBM traffic, and blocking collectives on top; not less than
            all collectives, nor than the traffic with the host.
        hbm_bytes: the HBM traffic.
    """

    compute: float
    hbm: float
    host: float
    collectives: float
    total: float
    hbm_bytes: int


def estimate(module: Module, found: Sequence[Collective], kernels: Mapping[str, KernelFlops], chip: Chip) -> Estimate:
    """The estimate for a program.

    Args:
        module: the optimized program.
        found: its collectives.
        kernels: FLOPs of one call of each attention kernel.
        chip: peaks.
    """
    compute = hbm = host = busy = 0.0
    moved = 0
    for name, computation in module.computations.items():
        runs = module.multiplicities[name]
        if not runs or name in module.fused_computations:
            continue
        for instruction in computation.instructions.values():
            flops = runs * _flops_with_fused(module, computation, instruction, kernels)
            size = runs * traffic(module, computation, instruction, HBM)
            compute, hbm = compute + flops / chip.bf16_flops, hbm + size / chip.hbm_bandwidth
            busy += max(flops / chip.bf16_flops, size / chip.hbm_bandwidth)
            host += runs * traffic(module, computation, instruction, HOST) / chip.host_bandwidth
            moved += size
    # A ring along one axis of the torus sends to both neighbours.
    sending = [(each.blocking, each.runs * each.wire_bytes / (2 * chip.link_bandwidth)) for each in found]
    communication = sum(seconds for _, seconds in sending)
    blocking = sum(seconds for is_blocking, seconds in sending if is_blocking)
    return Estimate(compute, hbm, host, communication, max(busy + blocking, communication, host), moved)


def _flops_with_fused(
    module: Module, computation: Computation, instruction: Instruction, kernels: Mapping[str, KernelFlops]
) -> float:
    flops = instruction_flops(computation, instruction, kernels)
    if instruction.opcode == "fusion":
        for name in instruction.called.get("calls", ()):
            inner = module.computations[name]
            flops += sum(_flops_with_fused(module, inner, each, kernels) for each in inner.instructions.values())
    return flops


def traffic(module: Module, computation: Computation, instruction: Instruction, space: int) -> int:
    """Bytes that an instruction reads from and writes to a memory space.

    A fusion that only slices an operand reads the slice; one that updates a slice in place writes the slice.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done"):
        return 0
    if opcode == "custom-call" and "tpu_custom_call" not in instruction.attributes:
        return 0  # the compiler's own: they allocate buffers or view them in another way
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if opcode == "copy-start" or opcode.removesuffix("-start") in SLICES:
        # The result of an asynchronous slice is (its operands, the slice, a flag).
        source, result = operands[0].shapes[0], instruction.shapes[1 if opcode in ASYNCHRONOUS_SLICES else 0]
        return sum(result.bytes for shape in (result, source) if shape.memory_space == space)
    if opcode == "dynamic-update-slice":
        update = operands[1].shapes[0]
        return sum(update.bytes for shape in (instruction.shapes[0], update) if shape.memory_space == space)
    inner = module.computations[instruction.called["calls"][0]] if opcode == "fusion" else None
    total = 0
    for index, operand in enumerate(operands):
        whole = sum(shape.bytes for shape in operand.shapes if shape.memory_space == space)
        total += whole if inner is None or not whole else min(whole, _bytes_read(inner, index, whole))
    return total + _bytes_written(inner, instruction, space)


def _bytes_read(inner: Computation, index: int, whole: int) -> int:
    """Of parameter `index` of a fused computation: only slices, if it is only sliced or updated in place."""
    parameter = next(
        (i for i in inner.instructions.values() if i.opcode == "parameter" and i.arguments == str(index)), None
    )
    if parameter is None:
        return whole
    names, total = {parameter.name}, 0
    for user in inner.instructions.values():  # operands come before their users
        if not names.intersection(user.operands):
            continue
        if user.opcode == "bitcast":
            names.add(user.name)
        elif user.opcode in SLICES and user.operands[0] in names:
            total += user.shapes[0].bytes
        elif user.opcode != "dynamic-update-slice" or user.operands[0] not in names:
            return whole
    return total


def _bytes_written(inner: Computation | None, instruction: Instruction, space: int) -> int:
    shapes = [shape for shape in instruction.shapes if shape.memory_space == space]
    if inner is None or inner.root is None:
        return sum(shape.bytes for shape in shapes)
    root = inner.root
    results = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(instruction.shapes):
        return sum(shape.bytes for shape in shapes)
    total = 0
    for result, shape in zip(results, instruction.shapes, strict=True):
        while result.opcode == "bitcast":
            result = inner.operand(result, 0)
        update = result.opcode == "dynamic-update-slice"
        if shape.memory_space == space:
            total += inner.operand(result, 1).shapes[0].bytes if update else shape.bytes
    return total
