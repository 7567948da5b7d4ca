r"""Letters of a formula: in LaTeX, every letter outside a command and outside `\text` is a symbol of its own."""

import re
from collections.abc import Iterable, Mapping

_TOKEN = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")
CONSTANTS = frozenset("ei")  # never parameters
_GREEK_LETTERS = (
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu \xi "
    r"\rho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Sigma \Phi \Psi \Omega \ell"
)
GREEK = frozenset(_GREEK_LETTERS.split())
NAME = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\w|\{[^{}]*\}))?'*")
_FUNCTION = re.compile(
    rf"(?P<name>{NAME.pattern})\s*\(\s*(?P<arguments>(?:[A-Za-z]|\\[a-z]+)(?:\s*,\s*(?:[A-Za-z]|\\[a-z]+))*)\s*\)"
)


def letters(text: str) -> tuple[str, ...]:
    """The symbols of a formula in order of first appearance."""
    found = (token for token in _TOKEN.findall(text) if len(token) == 1 or token in GREEK)
    return tuple(dict.fromkeys(found))


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The formula with its symbols renamed, all at once."""
    return _TOKEN.sub(lambda match: f" {names[match[0]]} " if match[0] in names else match[0], text)


def is_name(text: str) -> bool:
    """Whether a side of an equation only names what the other side is: `x`, `a_1`, `f(3)`, `P(A)`, `\\angle ABC`."""
    text = text.strip()
    if NAME.fullmatch(text) or re.fullmatch(r"\\text\s*\{[^{}]*\}|\\angle\s*[A-Z]{1,3}|[A-Z]{2,4}|\|[A-Z]{2}\|", text):
        return True
    return bool(re.fullmatch(rf"{NAME.pattern}\s*\([^()=]*\)", text))


def function(text: str) -> tuple[str, tuple[str, ...]] | None:
    """The name and the argument letters of `f(x, y)`; None for anything else."""
    match = _FUNCTION.fullmatch(text.strip())
    if match is None:
        return None
    return match["name"], tuple(part.strip() for part in match["arguments"].split(","))


def parameters(text: str, bound: Iterable[str]) -> tuple[str, ...]:
    """The letters of a formula that are neither bound nor constants."""
    return tuple(letter for letter in letters(text) if letter not in {*bound, *CONSTANTS})
