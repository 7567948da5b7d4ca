"""Reads optimized HLO text: computations, their instructions, and how often each of them runs.

The compiler's own cost analysis counts the body of a loop once. Here a loop's body counts as often as the loop turns,
and what is inside fusions counts with the fusion.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# A program counts a loop whose number of turns the text does not tell as one turn, and says so.
UNKNOWN_TURNS = 1

BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_BITS_IN_NAME = re.compile(r"^(?:bf|f|s|u)(\d+)")
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([^\s(]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?(\S+) = (.*)$")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)


@dataclass(frozen=True)
class Shape:
    """An array's type.

    Attributes:
        dtype: HLO's name, e.g. "bf16".
        dimensions: sizes.
        memory_space: from the layout: 0 is HBM, 5 the host, others are memories on the chip.
    """

    dtype: str
    dimensions: tuple[int, ...]
    memory_space: int = 0

    @property
    def elements(self) -> int:
        """Number of entries."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Size without the layout's padding."""
        match = _BITS_IN_NAME.match(self.dtype)
        bits = BITS[self.dtype] if self.dtype in BITS else int(match.group(1)) if match else 0
        return -(-self.elements * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the percent sign.
        opcode: e.g. "fusion".
        shapes: arrays of the result, tuples flattened.
        operands: names of the inputs; empty for parameters and constants.
        arguments: the text between the parentheses.
        attributes: the text after them.
        is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool = False

    @property
    def called(self) -> dict[str, list[str]]:
        """Computations that it names, by attribute (calls, body, condition, ...)."""
        found: dict[str, list[str]] = {}
        for attribute, single, several in _CALLED.findall(self.attributes):
            names = [single] if single else [name.strip().lstrip("%") for name in several.split(",")]
            found.setdefault(attribute, []).extend(name for name in names if name)
        return found

    def attribute(self, name: str) -> str | None:
        """An attribute that is a word, a number or something in braces; None if absent."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes)
        return match.group(1) if match else None

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from; empty if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


@dataclass
class Computation:
    """A named list of instructions, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value it returns."""
        return next((i for i in self.instructions.values() if i.is_root), None)

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """The instruction that makes an operand."""
        return self.instructions[instruction.operands[index]]


@dataclass
class Module:
    """A parsed program.

    Attributes:
        computations: by name.
        entry: name of the one that runs.
        unknown_loops: loops whose turns could not be told, filled in by `multiplicities`.
    """

    computations: dict[str, Computation]
    entry: str
    unknown_loops: list[str] = field(default_factory=list)

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """All of them, with where they are."""
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                yield computation, instruction

    @functools.cached_property
    def multiplicities(self) -> Mapping[str, int]:
        """How often each computation runs per execution of the program.

        Every branch of a conditional counts, so that what depends on data is an upper bound. Computations that a
        reduction or a collective applies to elements count zero: they are part of the instruction.
        """
        runs = dict.fromkeys(self.computations, 0)
        runs[self.entry] = 1
        for name in self._callers_first():
            for instruction in self.computations[name].instructions.values():
                for called, times in self._calls(instruction, self.computations[name]):
                    runs[called] += runs[name] * times
        return runs

    @functools.cached_property
    def async_computations(self) -> frozenset[str]:
        """Computations that run beside what follows their start."""
        return frozenset(
            name
            for _, instruction in self.instructions()
            if instruction.opcode == "async-start"
            for names in instruction.called.values()
            for name in names
        )

    @functools.cached_property
    def fused_computations(self) -> frozenset[str]:
        """Computations that are the inside of a fusion."""
        return frozenset(
            name
            for _, instruction in self.instructions()
            if instruction.opcode == "fusion"
            for names in instruction.called.values()
            for name in names
        )

    def _calls(self, instruction: Instruction, computation: Computation) -> list[tuple[str, int]]:
        called = instruction.called
        if instruction.opcode in ("async-update", "async-done"):
            return []  # they name what their start runs
        if instruction.opcode == "while":
            turns = self.turns(instruction, computation)
            return [(name, turns) for name in called["body"]] + [(name, turns + 1) for name in called["condition"]]
        if instruction.opcode != "call":
            called.pop("to_apply", None)
        return [(name, 1) for names in called.values() for name in names if name in self.computations]

    def _callers_first(self) -> list[str]:
        order: list[str] = []
        seen: set[str] = set()
        stack: list[tuple[str, bool]] = [(self.entry, False)]
        while stack:
            name, done = stack.pop()
            if done:
                order.append(name)
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                for instruction in self.computations[name].instructions.values():
                    for names in instruction.called.values():
                        stack.extend((other, False) for other in names if other in self.computations)
        return order[::-1]

    def turns(self, loop: Instruction, computation: Computation) -> int:
        """Turns of a while loop, at most: what the compiler recorded, else the limit that its condition compares with.

        A loop that may end earlier (a condition with several parts) counts up to its limit.
        """
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return int(known.group(1))
        bounds = [
            -(-(limit - self._initial(loop, computation, counter)) // self._stride(loop, counter))
            for limit, counter in _limits(self, self.computations[loop.called["condition"][0]])
        ]
        if not bounds:
            if loop.name not in self.unknown_loops:
                self.unknown_loops.append(loop.name)
            return UNKNOWN_TURNS
        return max(0, min(bounds))

    def _stride(self, loop: Instruction, counter: int) -> int:
        """What a turn adds to the counter; 1 unless the body tells. (The compiler unrolls its own loops by two.)"""
        body = self.computations[loop.called["body"][0]]
        if body.root is None or body.root.opcode != "tuple":
            return 1
        value = body.operand(body.root, counter)
        while value.opcode in ("copy", "bitcast", "convert"):
            value = body.operand(value, 0)
        if value.opcode != "add":
            return 1
        terms = [body.operand(value, index) for index in range(2)]
        strides = [int(t.arguments) for t in terms if t.opcode == "constant" and _is_integer(t.arguments)]
        return strides[0] if len(strides) == 1 and strides[0] > 0 else 1

    def _initial(self, loop: Instruction, computation: Computation, counter: int) -> int:
        """Where the counter starts; 0 unless the loop's operand tells."""
        state = computation.operand(loop, 0)
        if state.opcode != "tuple":
            return 0
        value = computation.operand(state, counter)
        while value.opcode in ("copy", "bitcast", "convert"):
            value = computation.operand(value, 0)
        return int(value.arguments) if value.opcode == "constant" and _is_integer(value.arguments) else 0


def _limits(module: Module, condition: Computation) -> list[tuple[int, int]]:
    """(exclusive limit, index of the counter in the loop's state) for every `counter < constant` of a condition."""
    found: list[tuple[int, int]] = []

    def origin(place: Computation, name: str, caller: Instruction | None) -> tuple[str, int] | None:
        value = place.instructions[name]
        while value.opcode in ("copy", "bitcast", "convert"):
            value = place.operand(value, 0)
        if value.opcode == "constant" and _is_integer(value.arguments):
            return "constant", int(value.arguments)
        if value.opcode == "get-tuple-element":
            index = value.attribute("index")
            return ("counter", int(index)) if index is not None else None
        if value.opcode == "parameter" and caller is not None:
            return origin(condition, caller.operands[int(value.arguments)], None)
        return None

    def visit(place: Computation, caller: Instruction | None) -> None:
        for instruction in place.instructions.values():
            if instruction.opcode == "compare":
                left, right = (origin(place, name, caller) for name in instruction.operands)
                direction = instruction.attribute("direction")
                if direction in ("GT", "GE"):
                    left, right, direction = right, left, {"GT": "LT", "GE": "LE"}[direction]
                if direction in ("LT", "LE") and left and right and (left[0], right[0]) == ("counter", "constant"):
                    found.append((right[1] + (direction == "LE"), left[1]))
            elif instruction.opcode in ("fusion", "call") and caller is None:
                for names in instruction.called.values():
                    for name in names:
                        visit(module.computations[name], instruction)

    visit(condition, None)
    return found


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in text.splitlines():
        if current is None:
            header = None if line.startswith(("HloModule", " ")) else _COMPUTATION.match(line)
            if header:
                current = computations[header.group(2)] = Computation(header.group(2))
                entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match.group(2), match.group(3), bool(match.group(1)))
            current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return Module(computations, entry)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """All arrays of a type, tuples flattened."""
    shapes = []
    for dtype, dimensions, layout in _SHAPE.findall(text):
        sizes = tuple(int(size.strip().lstrip("<=")) for size in dimensions.split(",") if size.strip())
        space = _MEMORY_SPACE.search(layout or "")
        shapes.append(Shape(dtype, sizes, memory_space=int(space.group(1)) if space else 0))
    return tuple(shapes)


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    type_text, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    opcode = rest[:opening]
    closing = _closing(rest, opening)
    arguments, attributes = rest[opening + 1 : closing], rest[closing + 1 :]
    operands: tuple[str, ...] = ()
    if opcode not in ("parameter", "constant", "iota"):
        plain = re.sub(r"/\*.*?\*/", "", arguments)
        operands = tuple(part.split()[-1].lstrip("%") for part in _split(plain) if part.strip())
    return Instruction(name, opcode, parse_shapes(type_text), operands, arguments, attributes, is_root)


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`; quoted text does not count."""
    depth, quoted = 0, False
    for index in range(opening, len(text)):
        character = text[index]
        if character == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and character == "(":
            depth += 1
        elif not quoted and character == ")":
            depth -= 1
            if depth == 0:
                return index
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]}")


def _split(text: str) -> list[str]:
    """Splits at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text.strip()) is not None
