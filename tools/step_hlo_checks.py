"""The checks of tools/check_step_hlo.py: each reads a parsed program and says what it found."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from vibethinker_jax.planning.collectives import is_reduce_scatter
from vibethinker_jax.planning.hlo import Computation, Instruction, Module, Shape, parse

ALL_REDUCE_LIMIT = 1 << 20
FORWARD, BACKWARD = "attention_forward", "attention_backward"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Sizes that the checks look for.

    Attributes:
        length: tokens of a row.
        shards: devices that share a row's tokens.
        rows: of one device (or of the devices that share them).
        layers: of the model.
        kv_heads: that one device's kernels read.
        heads: query heads of one device.
        head_dim: width of a head.
        vocabulary: rows of the embedding table, padding included.
        vocabulary_shards: devices that share them.
        columns: of the table that one device holds.
        widths: other sizes of the model that make an array something else than scores.
        strategy: of attention, "gather" or "ring".
    """

    length: int
    shards: int
    rows: int
    layers: int
    kv_heads: int
    heads: int
    head_dim: int
    vocabulary: int
    vocabulary_shards: int
    columns: int
    widths: frozenset[int]
    strategy: str

    @property
    def row_elements(self) -> int:
        """Elements of K, or V, of all tokens of a device's rows."""
        return self.rows * self.length * self.kv_heads * self.head_dim

    def is_whole_row(self, shape: Shape) -> bool:
        """Whether a dimension holds all tokens of a row although devices share them."""
        return self.shards > 1 and any(size and size % self.length == 0 for size in shape.dimensions)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check saw; `bad` is empty if it passed."""

    bad: Sequence[str]
    good: str


Arrays = Iterator[tuple[Computation, Instruction, Shape]]


def arrays(module: Module) -> Arrays:
    for computation, instruction in module.instructions():
        for shape in instruction.shapes:
            yield computation, instruction, shape


def describe(instruction: Instruction, *shapes: Shape) -> str:
    text = ", ".join(f"{s.dtype}[{','.join(map(str, s.dimensions))}]" for s in shapes or instruction.shapes)
    return f"{instruction.name} {text} {instruction.op_name}".rstrip()


def forbid(module: Module, is_bad: Callable[[Shape], bool], is_kind: Callable[[Shape], bool], kind: str) -> Finding:
    """No array is bad; names the largest of the kind that could have been."""
    bad = [describe(instruction, shape) for _, instruction, shape in arrays(module) if is_bad(shape)]
    kin = [(shape.elements, describe(i, shape)) for _, i, shape in arrays(module) if is_kind(shape)]
    return Finding(bad, f"largest {kind}: {max(kin)[1]}" if kin else f"no {kind}")


def check_scores(module: Module, facts: Facts) -> Finding:
    share = facts.length * facts.length // facts.shards
    local = facts.length // facts.shards

    def without_width(shape: Shape) -> bool:
        return not facts.widths.intersection(shape.dimensions)

    def is_bad(shape: Shape) -> bool:
        tokens = [size for size in shape.dimensions if size and size % local == 0]
        tokens = sorted(s for s in tokens if s not in facts.widths or s % facts.length == 0)[-2:]
        return shape.elements >= share and (
            without_width(shape) or (len(tokens) == 2 and tokens[0] * tokens[1] >= share)
        )

    return forbid(module, is_bad, without_width, "array without a width of the model")


def check_logits(module: Module, facts: Facts) -> Finding:
    part = facts.vocabulary // facts.vocabulary_shards
    limit = max(facts.rows * facts.length * part // 4, part * facts.columns + 1)

    def has_vocabulary(shape: Shape) -> bool:
        return any(size and size % part == 0 for size in shape.dimensions)

    def is_bad(shape: Shape) -> bool:
        return has_vocabulary(shape) and shape.elements >= limit

    return forbid(module, is_bad, has_vocabulary, f"array with a vocabulary (limit {limit:,} elements)")


def check_forward_once(module: Module, facts: Facts) -> Finding:
    calls, gradients = kernels(module, FORWARD), kernels(module, BACKWARD)
    bad = [describe(i) for _, i in calls if "transpose(jvp" in i.op_name]
    for _, loop in module.instructions():
        inside = reached(module, loop) if loop.opcode == "while" else set()
        if any(computation.name in inside for computation, _ in gradients):
            bad += [f"{describe(i)} in {loop.name}, with the backward kernel" for c, i in calls if c.name in inside]
    runs = sum(module.multiplicities[computation.name] for computation, _ in calls)
    wanted = facts.layers * (facts.shards if facts.strategy == "ring" else 1)
    if runs != wanted:
        bad.append(f"{len(calls)} forward kernels run {runs} times; layers x hops are {wanted}")
    if not gradients:
        bad.append("no backward kernel")
    return Finding(bad, f"{runs} runs: {'; '.join(describe(i, *i.shapes[:1]) for _, i in calls)}")


def check_kv_heads(module: Module, facts: Facts) -> Finding:
    bad, seen = [], []
    for name in (FORWARD, BACKWARD):
        for computation, call in kernels(module, name):
            given = [shape for operand in call.operands for shape in computation.instructions[operand].shapes]
            kv = [s for s in given if len(s.dimensions) == 4 and s.dimensions[-1] == facts.head_dim][-2:]
            (bad if any(s.dimensions[1] != facts.kv_heads for s in kv) else seen).append(describe(call, *kv))
    # Activations are as wide, but only those of a device's own tokens.
    repeated = facts.rows * facts.length * facts.heads * facts.head_dim
    for _, instruction, shape in arrays(module):
        if facts.heads > facts.kv_heads and facts.is_whole_row(shape) and shape.elements >= repeated:
            bad.append(describe(instruction, shape))
        if is_ring_permute(instruction) and shape.elements > facts.row_elements // facts.shards:
            bad.append(describe(instruction, shape))
    return Finding(bad or ([] if seen else ["no attention kernels"]), f"k and v of {'; '.join(seen)}")


def check_kv_gradients(module: Module, facts: Facts) -> Finding:
    if facts.shards == 1:
        return Finding([], "the sequence is not sharded")
    bad, good, runs = [], [], 0
    wanted = facts.row_elements // (facts.shards if facts.strategy == "ring" else 1)
    for computation, instruction in module.instructions():
        kind = collective(computation, instruction)
        if kind not in ("all-reduce", "reduce-scatter", "collective-permute"):
            continue
        given = [s for name in instruction.operands for s in computation.instructions[name].shapes]
        matching = [s for s in given if s.elements == wanted and s.dtype == "f32"]
        if kind == "all-reduce":
            bad += [describe(instruction, s) for s in given if s.elements == facts.row_elements]
        elif facts.strategy == "ring":
            hop = kind == "collective-permute" and is_ring_permute(instruction)
            runs += len(matching) * module.multiplicities[computation.name] if hop else 0
            good += [describe(instruction, *matching)] if matching and hop else []
        elif kind == "reduce-scatter" and any(facts.is_whole_row(s) for s in matching):
            runs += len(matching) * module.multiplicities[computation.name]
            good.append(describe(instruction, *matching))
    least = 2 * facts.layers * (facts.shards if facts.strategy == "ring" else 1)
    if runs < least:
        bad.append(f"float32 dK, dV of {wanted:,} elements are passed on or scattered {runs} times, fewer than {least}")
    return Finding(bad, f"{runs} times: {'; '.join(good)}")


def check_all_reduce(module: Module, facts: Facts) -> Finding:
    del facts
    found = [
        (sum(shape.bytes for shape in instruction.shapes), describe(instruction))
        for computation, instruction in module.instructions()
        if collective(computation, instruction) == "all-reduce"
    ]
    bad = [f"{size:,} bytes: {text}" for size, text in found if size > ALL_REDUCE_LIMIT]
    return Finding(bad, "largest of {:,} bytes: {}".format(*max(found)) if found else "no all-reduce")


def check_table(module: Module, facts: Facts) -> Finding:
    part = facts.vocabulary // facts.vocabulary_shards
    bad, largest = [], (0, "no all-gather")
    for computation, instruction in module.instructions():
        if collective(computation, instruction) != "all-gather":
            continue
        for shape in instruction.shapes:
            rows = [size for size in shape.dimensions if size and size % part == 0]
            columns = [size for size in shape.dimensions if size and size % facts.columns == 0]
            # An asynchronous start lists its operand, one device's part of the table, among its results.
            if rows and columns and shape.elements > part * facts.columns:
                bad.append(describe(instruction, shape))
            largest = max(largest, (shape.bytes, f"largest all-gather: {describe(instruction, shape)}"))
    return Finding(bad, largest[1])


def check_kept_rows(module: Module, facts: Facts) -> Finding:
    def is_stacked(shape: Shape) -> bool:
        return facts.layers in shape.dimensions and shape.dtype != "s32"

    def is_bad(shape: Shape) -> bool:
        return (
            is_stacked(shape) and facts.is_whole_row(shape) and shape.elements >= facts.layers * facts.row_elements // 2
        )

    return forbid(module, is_bad, is_stacked, "array of all layers")


def check_ring_overlap(module: Module, facts: Facts) -> Finding:
    if facts.strategy != "ring" or facts.shards == 1:
        return Finding([], "no ring")
    calls = [*kernels(module, FORWARD), *kernels(module, BACKWARD)]
    names, homes = {call.name for _, call in calls}, {computation.name for computation, _ in calls}
    bad, exposed, hoisted, spanning = [], [], 0, 0
    for computation in module.computations.values():
        order = list(computation.instructions.values())
        # A kernel may sit in a loop of its own inside the hop.
        places = [n for n, each in enumerate(order) if each.name in names or homes & reached(module, each)]
        for start, permute in enumerate(order):
            if not is_ring_permute(permute) or permute.opcode == "collective-permute-done":
                continue
            done = [
                n for n, each in enumerate(order) if each.opcode.endswith("-done") and permute.name in each.operands
            ]
            text = describe(permute, permute.shapes[0])
            if "while/body" not in permute.op_name.rpartition("shard_map")[2]:
                exposed.append(text)
            elif not places and module.multiplicities[computation.name] <= facts.shards:
                hoisted += 1  # once a step and not once a layer, like the codes of the keys
            elif not done or not any(start < place < done[0] for place in places):
                bad.append(text)
            else:
                spanning += 1
    if spanning < 6:
        bad.append(f"{spanning} transfers of a hop span a kernel; K, V forward and K, V, dK, dV backward are 6")
    # What a backward pass passes on after its last hop: dK and dV, once a layer.
    bad += exposed if len(exposed) > 2 else []
    after = f"; after the last hop, exposed: {'; '.join(exposed)}" if exposed else ""
    return Finding(bad, f"{spanning} transfers span kernels; {hoisted} once a step{after}")


CHECKS: Mapping[str, Callable[[Module, Facts], Finding]] = {
    "scores": check_scores,
    "logits": check_logits,
    "forward-once": check_forward_once,
    "kv-heads": check_kv_heads,
    "kv-gradients": check_kv_gradients,
    "all-reduce": check_all_reduce,
    "table": check_table,
    "kept-rows": check_kept_rows,
    "ring-overlap": check_ring_overlap,
}


def kernels(module: Module, name: str) -> list[tuple[Computation, Instruction]]:
    return [(c, i) for c, i in module.instructions() if i.opcode == "custom-call" and f"{name}/" in i.op_name + "/"]


def collective(computation: Computation, instruction: Instruction) -> str:
    """The kind of a collective; a fusion in which every chip keeps its slice of an all-reduce is a reduce-scatter."""
    kind = instruction.opcode.removesuffix("-start")
    return "reduce-scatter" if kind == "all-reduce" and is_reduce_scatter(computation.name) else kind


def is_ring_permute(instruction: Instruction) -> bool:
    name = instruction.op_name
    return instruction.opcode.startswith("collective-permute") and "shard_map" in name and name.endswith("ppermute")


def reached(module: Module, instruction: Instruction) -> set[str]:
    """Names of all computations that an instruction runs."""
    found: set[str] = set()
    stack = [name for names in instruction.called.values() for name in names] if "=" in instruction.attributes else []
    while stack:
        name = stack.pop()
        if name in found or name not in module.computations:
            continue
        found.add(name)
        inner = module.computations[name].instructions.values()
        stack += [called for each in inner for names in each.called.values() for called in names]
    return found


def judge(text: str, facts: Facts) -> dict[str, Finding]:
    """All checks on the text of an optimized program."""
    module = parse(text)
    return {name: check(module, facts) for name, check in CHECKS.items()}


def report(findings: Mapping[str, Finding]) -> list[str]:
    """Prints a line per check; returns the names of those that failed."""
    for name, finding in findings.items():
        more = f" (and {len(finding.bad) - 1} more)" if len(finding.bad) > 1 else ""
        text = f"{finding.bad[0]}{more}" if finding.bad else finding.good
        print(f"{'FAILED' if finding.bad else 'ok':6}  {name:12}  {text}", flush=True)
    return [name for name, finding in findings.items() if finding.bad]
