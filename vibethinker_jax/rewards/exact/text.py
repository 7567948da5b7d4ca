r"""One spelling for everything that LaTeX, Unicode and plain text spell differently. Linear string work.

The result is LaTeX in which `\text{...}` holds words, `\frac` is the only fraction command, spacing commands are gone
and brackets have no size.
"""

import re

from vibethinker_jax.rewards.numbers import strip_delimiters

_CHARACTERS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": r"\div ",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}",
    "\u221a": r"\sqrt ", "\u00b0": r"^\circ ", "\u2026": r"\ldots ", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
    "\u00b2": "^2", "\u00b3": "^3", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
    "\u03b8": r"\theta ", "\u20ac": r"\text{ euro}", "\u00a3": r"\text{ sterling}",
}  # fmt: skip
_CHARACTER = re.compile("|".join(map(re.escape, _CHARACTERS)))

_COMMANDS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom",
    "leq": r"\le ", "leqslant": r"\le ", "geq": r"\ge ", "geqslant": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">",
    "le": r"\le ", "ge": r"\ge ", "ne": r"\ne ", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "colon": ":", "dots": r"\ldots ", "cdots": r"\ldots ",
    "dotsc": r"\ldots ", "degree": r"^\circ ", "lg": r"\log_{10}", "imath": "i", "lor": r"\text{ or }",
    "land": r"\text{ and }", "vee": r"\text{ or }", "wedge": r"\text{ and }", "euro": r"\text{ euro}",
    "quad": " ", "qquad": " ", "left": "", "right": "", "big": "", "Big": "", "bigl": "", "bigr": "", "Bigl": "",
    "Bigr": "", "bigg": "", "Bigg": "", "displaystyle": "", "textstyle": "", "limits": "", "nolimits": "",
    "R": r"\mathbb{R}",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+) ?")
_SPACING = re.compile(r"\\[,;:> ]|~")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname|rm|bf)\s*\{([^{}]*)\}"
)
_CIRCLE = re.compile(r"\^\s*\{?\s*(?:\\circ|\\text\{\s*o\s*\})\s*\}?")
_SEGMENT = re.compile(r"\\(?:overline|overrightarrow|overleftrightarrow|vec|widehat)\s*\{\s*([A-Z]{2,})\s*\}")
_EMPHASIS = re.compile(r"\*\*(?=\S)([^*]+)(?<=\S)\*\*")

# Plain-text functions and constants, where no backslash says that they are LaTeX.
_PLAIN_NAMES = r"pi|theta|alpha|beta|lambda|sin|cos|tan|cot|sec|csc|log|ln|arcsin|arccos|arctan|infty"
_PLAIN_NAME = re.compile(rf"(?<![A-Za-z\\])({_PLAIN_NAMES})(?![A-Za-z])")
_PLAIN_CALL = re.compile(r"(?<![A-Za-z\\])(sqrt|exp|abs)\s*\(")
_PLAIN_OPERATORS = (("<=", r"\le "), (">=", r"\ge "), ("!=", r"\ne "), ("**", "^"), ("*", r"\cdot "))
_CALLS = {"sqrt": (r"\sqrt{", "}"), "exp": ("e^{", "}"), "abs": ("|", "|")}


def _command(match: re.Match[str]) -> str:
    return _COMMANDS.get(match[1], match[0])


def _words(match: re.Match[str]) -> str:
    r"""`\text{13}` and `\mathrm{e}` are mathematics; longer words stay words, in one wrapper."""
    words = match[1]
    after_digit = match.string[: match.start()].rstrip()[-1:].isdigit() and words.strip() not in ("e", "i", "")
    if after_digit and words.strip().isalpha():
        return rf"\text{{ {words.strip()}}}"  # `5\text{m}` is a quantity
    if re.fullmatch(r"\s*(?:[A-Za-z]|[0-9.,+\-/ ]*)\s*", words) and not words[:1].isspace():
        return f" {words} " if len(words.strip()) == 1 and not words.strip().isdigit() else words
    return rf"\text{{{words}}}"


def closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`, -1 without. Only that kind of bracket counts."""
    left, right = text[start], {"(": ")", "{": "}", "[": "]"}[text[start]]
    depth = 0
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1 : position] == "\\":
            continue
        depth += (text[position] == left) - (text[position] == right)
        if depth == 0:
            return position
    return -1


def _plain_calls(text: str) -> str:
    """`sqrt(x)`, `exp(x)` and `abs(x)` of plain text as LaTeX; at most ten, each rewritten once."""
    for _ in range(10):
        match = _PLAIN_CALL.search(text)
        end = closing(text, match.end() - 1) if match else -1
        if match is None or end < 0:
            break
        left, right = _CALLS[match[1]]
        text = text[: match.start()] + left + text[match.end() : end] + right + text[end + 1 :]
    return text


def _plain_exponents(text: str) -> str:
    """`x^(1/2)` as `x^{1/2}`."""
    for match in reversed(list(re.finditer(r"\^\s*\(", text))):
        end = closing(text, match.end() - 1)
        if end > 0:
            text = text[: match.start()] + "^{" + text[match.end() : end] + "}" + text[end + 1 :]
    return text


_APPROXIMATION = re.compile(r"(?<=\S)\s*(?:\\approx|\\simeq|\u2248)")  # what follows only rounds the answer
_REVERSED_BRACKETS = re.compile(r"([\[\]])([^\[\]()]*,[^\[\]()]*)([\[\]])")  # ]1, 2[ is the open interval
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}
_TAKES_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt)(?![A-Za-z])(\s*\[[^\]]*\])?")
_TOKEN = re.compile(r"\\[A-Za-z]+|[^\s\\{}]")


def _braced(text: str) -> str:
    r"""`\frac12` as `\frac{1}{2}`, `\sqrt 3` and `\sqrt(3)` as `\sqrt{3}`; inner commands first."""
    for command in reversed(list(_TAKES_ARGUMENTS.finditer(text))):
        position = command.end()
        for _ in range(_ARGUMENTS[command[1]]):
            position += len(text[position:]) - len(text[position:].lstrip())
            opening = text[position : position + 1]
            if opening == "{" or (opening == "(" and command[1] == "sqrt"):
                end = closing(text, position)
                if end < 0:
                    break
                text = text[:position] + "{" + text[position + 1 : end] + "}" + text[end + 1 :]
                position = end + 1
            else:
                token = _TOKEN.match(text, position)
                if token is None:
                    break
                text = text[:position] + "{" + token[0] + "}" + text[token.end() :]
                position = token.end() + 2
    return text


def normalise(text: str) -> str:
    """The one spelling of `text`; the same mathematics, never evaluated."""
    text = strip_delimiters(_EMPHASIS.sub(r"\1", text))
    text = text.replace(r"\$", "\0").replace("$", "").replace("\0", r"\$").replace(r"\(", "(").replace(r"\)", ")")
    text = _CHARACTER.sub(lambda match: _CHARACTERS[match[0]], text).replace("{,}", ",").replace(r",\!", ",")
    text = _SPACING.sub(" ", text.replace(r"\\", "\1").replace(r"\!", "")).replace("\1", r"\\")
    text = _WORDS.sub(_words, _COMMAND.sub(_command, text))
    text = _SEGMENT.sub(r"\1", _CIRCLE.sub(r"^\\circ ", text))
    if "\\text" not in text:
        text = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty ", text)
    for plain, latex in _PLAIN_OPERATORS:
        text = text.replace(plain, latex)
    text = _PLAIN_NAME.sub(r"\\\1 ", _plain_exponents(_plain_calls(text)))
    text = _APPROXIMATION.split(" ".join(_braced(text).split()).replace(" }", "}"))[0].strip()
    reversed_brackets = _REVERSED_BRACKETS.fullmatch(text)
    if reversed_brackets:
        left, inside, right = reversed_brackets.groups()
        text = f"{'(' if left == ']' else '['}{inside}{')' if right == '[' else ']'}"
    return text


def squeeze(text: str) -> str:
    """`text` without any space."""
    return "".join(text.split())
