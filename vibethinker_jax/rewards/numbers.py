"""Number literals, read exactly. Linear string work, safe in the training process."""

import re
from fractions import Fraction

_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)
        (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+ | [0-9]{1,3}(?:[ ][0-9]{3})+ | [0-9]+ | (?=\.[0-9]))
        (?:\.(?P<decimals>[0-9]*))?""",
    re.VERBOSE,
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def strip_delimiters(text: str) -> str:
    r"""`text` without surrounding space, one final full stop and enclosing `$...$`, `\(...\)` or `\[...\]`."""
    text = text.strip()
    if text.endswith(".") and not text.endswith(r"\right."):
        text = text[:-1].rstrip()
    for left, right in _DELIMITERS:
        inner = text[len(left) : len(text) - len(right)]
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and "$" not in inner:
            return strip_delimiters(inner)
    return text


def number(text: str) -> Fraction | None:
    r"""The exact value of a plain number literal, None for anything else.

    Read as numbers: `72`, `-72`, `+72`, `072` (AIME style), `72.`, `72.0`, `72.50`, `.5`, `1,234`, `1{,}234`, `1\,234`,
    `1 234`, `$72`, `\$72`, each also between math delimiters and before a full stop. Not read: units, percent,
    fractions, powers, decimal commas. Zeros after the decimal point do not matter: `72.0` is the integer 72.
    """
    if len(text) > 1000:  # Python refuses to convert integers beyond 4,300 digits
        return None
    text = strip_delimiters(text).replace(r"\!", "").replace("{,}", ",").replace("\u2212", "-")
    text = text.replace(r"\,", ",").replace(r"\ ", " ").replace("~", " ").replace(",,", ",")
    text = text.removeprefix("\\").removeprefix("$").strip() if text.startswith(("$", r"\$")) else text
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    whole = re.sub("[, ]", "", match["whole"]) or "0"
    return Fraction(f"{match['sign']}{whole}.{match['decimals'] or '0'}")
