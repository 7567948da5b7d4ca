r"""Finds the outer structure of an answer: lists, sets, tuples, intervals, relations, units. Evaluates nothing."""

import re

from vibethinker_jax.rewards.exact.answer import (
    Answer,
    Expression,
    Family,
    Matrix,
    Ratio,
    Readings,
    Region,
    Relation,
    Sequence,
    Words,
)  # fmt: skip
from vibethinker_jax.rewards.exact.quantity import quantity
from vibethinker_jax.rewards.exact.regions import bracketed_interval, intersection, region_of_relation, union
from vibethinker_jax.rewards.exact.split import cut, unwrapped
from vibethinker_jax.rewards.exact.symbols import is_name, letters
from vibethinker_jax.rewards.numbers import number

MAX_DEPTH = 12
MAX_PRODUCT_LETTERS = 3  # `abc` may be a product, `Yes` a word; longer runs of letters are words
_CONNECTIVE = re.compile(r"\\text\s*\{\s*,?\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|[,;]")
_RELATION = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|[<>=]")
_SUCH_THAT = re.compile(r"\\mid(?![A-Za-z])|\\text\s*\{\s*such that\s*\}|[|:]")
_MATRIX = re.compile(
    r"\\begin\{([bpB]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}(?:\^\{?(?:T|\\top|\\intercal)\}?)?"
)
_TRANSPOSED = re.compile(r"\^\{?(?:T|\\top|\\intercal)\}?$")
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
_DECLARATION = re.compile(
    r"(?:,|\\text\s*\{\s*,?)?\s*\(?(?:where|for (?:some|all|any|every|each)|with)\b(?:\s*\\text\{)?(.*)$", re.IGNORECASE
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' \-]*")
_SIGNED_CHOICE = re.compile(r"\\(pm|mp)(?![A-Za-z])")


def read(text: str, depth: int = 0) -> Readings:
    """All readings of a normalised text, the likeliest first; at least one."""
    text = text.strip()
    plain: Readings = (Expression(text),)
    if depth > MAX_DEPTH or not text:
        return plain
    words = _words(text)
    if words is not None:
        return (words, *plain) if len(words.text) <= MAX_PRODUCT_LETTERS and "\\text" not in text else (words,)
    if number(text) is not None and "$" not in text:
        pieces, _ = cut(text, re.compile(","))
        return plain if len(pieces) < 2 else (*plain, _listed(pieces, [","] * (len(pieces) - 1), depth))
    for reader in (_family, _several, _either_sign, _related, _combined, _enclosed, _matrix, _ratio):
        readings = reader(text, depth)
        if readings:
            return readings
    measured = quantity(text)
    if measured is None:
        return plain
    return (measured, *plain) if measured.tentative else (measured,)


def _words(text: str) -> Words | None:
    """Words where text has no mathematics at all. Single letters are no words, two only if written as words."""
    inside = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    bare = " ".join(inside.split()).strip(" .")
    if not _WORDS.fullmatch(bare) or len(bare) < 2:
        return None
    if len(bare) == 2 and "\\text" not in text and not (bare[0].isupper() and bare[1].islower()):
        return None
    return Words(bare.casefold())


def _family(text: str, depth: int) -> Readings:
    """An answer followed by a declaration of its parameters."""
    del depth
    match = _DECLARATION.search(text)
    pieces, _ = cut(text, re.compile(r",|\\text\s*\{\s*(?:,|for|where|with)?\s*\}|\\quad"))
    if len(pieces) > 1 and re.match(r"\(?\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\\in(?![A-Za-z])", pieces[-1]):
        last = pieces[-1].strip()
        last = last[1:-1] if last.startswith("(") and last.endswith(")") else last
        names, _, domain = last.partition(r"\in")
        while len(pieces) > 2 and re.fullmatch("[A-Za-z]", pieces[-2]):
            names += pieces.pop(-2)
        body = text[: text.index(pieces[-1])].strip()
        body = re.sub(r"(?:[,(]|\\text\s*\{[^{}]*\})\s*(?:[A-Za-z]\s*,\s*)*$", "", body).strip()
        return (Family(body, letters(names), (domain.strip(),)),)
    if match is not None and match.start() > 0:
        body = text[: match.start()].strip().rstrip(",").strip()
        declared = match[1].replace("}", " ").replace(r"\text{", " ")
        single = tuple(
            re.findall(r"(?<![A-Za-z\\])([A-Za-z])(?![A-Za-z])", re.sub(r"\ba\b(?=\s+[a-z]{2})", "", declared))
        )
        used = tuple(letter for letter in dict.fromkeys(single) if letter in letters(body))
        return (Family(body, used),) if used else read(body, 1)
    return ()


def _several(text: str, depth: int) -> Readings:
    pieces, separators = cut(text, _CONNECTIVE)
    if len(pieces) < 2:
        return ()
    kept = [(piece, sign) for piece, sign in zip(pieces, ["", *separators], strict=True) if piece]
    if len(kept) < 2:
        return read(kept[0][0], depth + 1) if kept else ()
    return (_listed([piece for piece, _ in kept], [sign for _, sign in kept[1:]], depth),)


def _listed(pieces: list[str], separators: list[str], depth: int) -> Answer:
    """A bare list, or the region that several inequalities describe."""
    named = [pieces[0]]
    for piece in pieces[1:]:  # in `n = 2, 3, 4` all three are values of n
        name, equals, _ = named[-1].partition("=")
        inherits = equals and is_name(name) and not _RELATION.search(piece)
        named.append(f"{name.strip()} = {piece}" if inherits else piece)
    items: list[Readings] = []
    for piece in named:
        readings = read(piece, depth + 1)
        first = readings[0]
        if isinstance(first, Sequence) and first.kind == "list" and len(readings) == 1:
            items += first.items  # `\pm 1, \pm 2` is one list
        else:
            items.append(readings)
    regions = [readings[0] for readings in items if isinstance(readings[0], Region) and readings[0].variable]
    if len(regions) == len(items):
        joined = union(regions) if any("or" in sign for sign in separators) else intersection(regions)
        if joined is not None:
            return joined
    return Sequence("list", tuple(items))


def _either_sign(text: str, depth: int) -> Readings:
    r"""`1 \pm \sqrt{2}` as a list of two: all signs of one kind are chosen together."""
    if not _SIGNED_CHOICE.search(text):
        return ()
    choices = []
    for upper, lower in (("+", "-"), ("-", "+")):
        chosen = re.sub(r"\\mp(?![A-Za-z])", lower, re.sub(r"\\pm(?![A-Za-z])", upper, text))
        choices.append(re.sub(r"(^|[=({,])\s*\+", r"\1", chosen))
    return (Sequence("list", tuple(read(choice, depth + 1) for choice in choices)),)


def _related(text: str, depth: int) -> Readings:
    sides, signs = cut(text, _RELATION)
    if len(sides) < 2 or not all(sides):
        return ()
    if r"\in" in signs:
        return read(sides[-1], depth + 1) if len(sides) == 2 and is_name(sides[0]) else ()
    region = region_of_relation(sides, signs)
    if region is not None:
        return (region,)
    if set(signs) == {"="} and len(sides) == 2:  # `(a, b) = (1, 2)` is `a = 1, b = 2`
        left, right = (unwrapped(side, "(", ")") for side in sides)
        if left and right:
            names, values = cut(left, re.compile(","))[0], cut(right, re.compile(","))[0]
            if len(names) == len(values) > 1 and all(map(is_name, names)):
                equations = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
                return (Sequence("tuple", tuple(read(equation, depth + 1) for equation in equations)),)
    return (Relation(tuple(sides), tuple(signs)),)


def _combined(text: str, depth: int) -> Readings:
    r"""Unions of intervals and finite sets, and the real numbers without some points."""
    if squeezed := re.sub(r"\s", "", text):
        if squeezed in (r"\mathbb{R}", r"(-\infty,\infty)", r"(-\infty,+\infty)"):
            return (bracketed_interval(r"(-\infty,\infty)"),)
        if squeezed in (r"\emptyset", r"\varnothing", r"\{\}"):
            return (Sequence("set", ()),)
    pieces, _ = cut(text, re.compile(r"\\cup(?![A-Za-z])"))
    if len(pieces) > 1:
        regions = [_as_region(piece) for piece in pieces]
        joined = union([region for region in regions if region]) if all(regions) else None
        return (joined,) if joined is not None else ()
    pieces, _ = cut(text, re.compile(r"\\setminus(?![A-Za-z])|\\backslash(?![A-Za-z])"))
    if len(pieces) == 2 and pieces[0].replace(" ", "") == r"\mathbb{R}":
        points = unwrapped(pieces[1], r"\{", r"\}")
        if points:
            return _readings(
                intersection([region_of_relation(["x", point], [r"\ne"]) for point in cut(points, re.compile(","))[0]])
            )
    return ()


def _readings(answer: Answer | None) -> Readings:
    """A region found in set notation, which names no variable."""
    return (Region(answer.intervals),) if isinstance(answer, Region) else ()


def _as_region(text: str) -> Region | None:
    """An interval, or a finite set as single points."""
    points = unwrapped(text, r"\{", r"\}")
    if points is not None:
        regions = [bracketed_interval(f"[{point},{point}]") for point in cut(points, re.compile(","))[0]]
        return union([region for region in regions if region])
    return bracketed_interval(text)


def _enclosed(text: str, depth: int) -> Readings:
    text = _TRANSPOSED.sub("", text) if text.startswith(("(", "[")) else text
    inside = unwrapped(text, r"\{", r"\}")
    if inside is not None:
        return _set(inside, depth)
    for left, right in ((r"\langle", r"\rangle"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        inside = unwrapped(text, left, right)
        if inside is None:
            continue
        if number(inside) is not None and left == "(":  # `(1,000)`: brackets around one number, or a pair
            return (Expression(inside), *_items(inside, depth))
        pieces, _ = cut(inside, re.compile("[,;]"))
        if len(pieces) == 1:
            return read(inside, depth + 1) if left == "(" and inside else ()
        interval = bracketed_interval(text)
        if {left, right} in ({"(", "]"}, {"[", ")"}):
            return (interval,) if interval is not None else ()
        if interval is None:
            return _items(inside, depth)
        return (*_items(inside, depth), interval) if left == "(" else (interval,)
    return ()


def _items(inside: str, depth: int, kind: str = "tuple") -> Readings:
    pieces = [piece for piece in cut(inside, re.compile("[,;]"))[0] if piece]
    return (Sequence(kind, tuple(read(piece, depth + 1) for piece in pieces)),)


def _set(inside: str, depth: int) -> Readings:
    r"""`\{1, 2\}`, `\{x \mid x > 2\}`, `\{k\pi \mid k \in \mathbb{Z}\}`."""
    pieces, _ = cut(inside, _SUCH_THAT)
    if len(pieces) == 2:
        element, condition = pieces
        variable = re.match(r"([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?$", element)
        if variable is not None:
            readings = read(condition, depth + 1)
            if isinstance(readings[0], Region) and readings[0].variable == variable[1]:
                return (Region(readings[0].intervals),)
            return (Family(condition, (variable[1],)),)
        names, _, domain = condition.partition(r"\in")
        return (Family(element, tuple(n for n in letters(names) if n in letters(element)), (domain.strip(),)),)
    if not inside:
        return (Sequence("set", ()),)
    readings = read(inside, depth + 1)
    sets: list[Answer] = []
    for reading in readings:
        is_list = isinstance(reading, Sequence) and reading.kind == "list"
        sets.append(Sequence("set", reading.items if is_list else ((reading,),)))
    return tuple(sets)


def _matrix(text: str, depth: int) -> Readings:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[2]:
        return ()
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    cells = tuple(tuple(read(cell, depth + 1) for cell in row.split("&")) for row in rows)
    if len(cells) == 1 or all(len(row) == 1 for row in cells):
        return (Sequence("tuple", tuple(cell for row in cells for cell in row)),)
    return (Matrix(cells),)


def _ratio(text: str, depth: int) -> Readings:
    del depth
    terms, _ = cut(text, re.compile(":"))
    if len(terms) < 2 or not all(terms):
        return ()
    return (Ratio(tuple(terms), bool(_CLOCK.fullmatch(text))),)
