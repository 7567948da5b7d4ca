r"""Pairs that verifiers elsewhere judge wrongly or have judged wrongly, each with five generated variants.

A template is the pair with `@name` or `@(expression)` in place of its numbers, letters and units; `draw` fills them in.
"""

import random
import re
from typing import NamedTuple

import pytest

from vibethinker_jax.rewards.base import get_verifier

VARIANTS = 5
UNITS = [
    ("km", "m", 1000),
    ("m", "cm", 100),
    ("kg", "g", 1000),
    ("h", "min", 60),
    ("L", "mL", 1000),
    ("GW", "MW", 1000),
]


class Row(NamedTuple):
    name: str
    right: bool
    gold: str
    answer: str
    gold_template: str
    answer_template: str
    boxed: bool = True


def draw(rng: random.Random) -> dict:
    """Numbers a < b < c < d below 100, coprime to each other and no multiples of ten; letters; units."""
    a, b, c, d = sorted(rng.sample([n for n in range(11, 97) if n % 2 and n % 3 and n % 5 and n % 7], 4))
    x, y = rng.sample("xyzuvwt", 2)
    k, m = rng.sample("kmnpq", 2)
    capital, other = rng.sample("ABCDEFGH", 2)
    unit, smaller, factor = rng.choice(UNITS)
    return {
        "a": a, "b": b, "c": c, "d": d, "x": x, "y": y, "k": k, "m": m, "C": capital, "D": other,
        "u": unit, "v": smaller, "f": factor, "g": rng.choice([20, 30, 45, 60, 72, 120]), "s": rng.randint(2, 9),
        "t": rng.randint(100, 999), "p": rng.choice([7, 11, 13, 17, 19]), "round": round, "str": str,
    }  # fmt: skip


def filled(template: str, values: dict) -> str:
    return re.sub(
        r"@\(((?:[^()]|\([^()]*\))*)\)|@([a-zA-Z])",
        lambda m: str(eval(m[1] or m[2], {"__builtins__": {}}, values)),
        template,
    )


# What math-verify 0.9.0 gets wrong.
MISJUDGED = [
    Row("percent is no number", False, "28", r"28\%", "@a", r"@a\%"),
    Row("a tuple is no set", False, r"\{1,2,3\}", "(3,2,1)", r"\{@a,@b,@c\}", "(@c,@b,@a)"),
    Row("tiny fractions", False, r"\frac1{2004!}", r"\frac1{2006!}", r"\frac1{@(a+30)!}", r"\frac1{@(a+32)!}"),
    Row("units differ", False, r"5\text{ cm}", r"5\text{ m}", r"@a\text{ @u}", r"@a\text{ @v}"),
    Row("units convert", True, r"5\text{ km}", r"5000\text{ m}", r"@a\text{ @u}", r"@(a*f)\text{ @v}"),
    Row("decimals do not round", False, "1/3", "0.333333", "1/@p", "@(round(1/p,6))"),
    Row("a sum is no value", False, "17", "16+1", "@(a+b)", "@a+@b"),
    Row("a false equation", False, "5", "7=5", "@a", "@b=@a"),
    Row("a false chain", False, "5", "2+2=4=5", "@a", "@b+@c=@(b+c)=@a"),
    Row("letters have a case", False, "A", "a", "@C", "@(C.lower())"),
    Row("half of two values", False, "1331 and 1728", "1728", "@a and @b", "@b"),
    Row("an unboxed fraction as gold", True, r"\dfrac97", r"\dfrac97", r"\dfrac{@a}@s", r"\dfrac{@a}@s"),
    Row("an unboxed letter as gold", True, "A", "A", "@C", "@C"),
    Row("thousands in brackets", True, "(1,000)", "1000", "(@a,000)", "@(a*1000)"),
    Row("thin spaces", True, r"1\,234", "1234", r"@a\,@t", "@(a*1000+t)"),
    Row("a list that looks like thousands", True, r"\{12,345\}", "12,345", r"\{@a,@t\}", "@a,@t"),
    Row("plus or minus", True, r"\frac{-1+\sqrt{17}}2, \frac{-1-\sqrt{17}}2", r"\frac{-1\pm\sqrt{17}}2",
        r"\frac{-@a+\sqrt{@b}}2, \frac{-@a-\sqrt{@b}}2", r"\frac{-@a\pm\sqrt{@b}}2"),
    Row("set builder and interval", True, r"\{x\mid x>2\}", r"(2,\infty)", r"\{@x\mid @x>@a\}", r"(@a,\infty)"),
    Row("column vector", True, r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)", r"\begin{pmatrix}@b\\@a\end{pmatrix}",
        "(@b,@a)"),
    Row("degrees", True, r"90^\circ", r"\frac\pi2", r"@g^\circ", r"\frac{@g\pi}{180}"),
    Row("logarithms", True, r"\log 2", r"\ln 2", r"\log @a", r"\ln @a"),
    Row("imaginary unit", True, r"\sqrt{-1}", "i", r"\sqrt{-@(s*s)}", "@s i"),
    Row("segments", True, r"\overline{AB}", "AB", r"\overline{@C@D}", "@C@D"),
]  # fmt: skip

# What it gets right: ours must too.
JUDGED_WELL = [
    Row("open is not closed", False, "(1,2)", "[1,2]", "(@a,@b)", "[@a,@b]"),
    Row("half open", True, "(1,2]", r"1<x\le2", "(@a,@b]", r"@a<@x\le @b"),
    Row("unions and setminus", True, r"(-\infty,2)\cup(2,\infty)", r"\mathbb{R}\setminus\{2\}",
        r"(-\infty,@a)\cup(@a,\infty)", r"\mathbb{R}\setminus\{@a\}"),
    Row("matrices", True, r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        r"\begin{pmatrix}@a&@b\\@c&@d\end{pmatrix}", r"\begin{bmatrix}@a&@b\\@c&@d\end{bmatrix}"),
    Row("matrices differ", False, r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}",
        r"\begin{pmatrix}@a&@b\\@c&@d\end{pmatrix}", r"\begin{pmatrix}@a&@b\\@d&@c\end{pmatrix}"),
    Row("percent as decimal", True, r"28\%", "0.28", r"@a\%", "0.@a"),
    Row("percent in words", True, r"28\%", "28 percent", r"@a\%", "@a percent"),
    Row("braced comma", True, "1000", r"1{,}000", "@(a*1000)", r"@a{,}000"),
    Row("scaled ellipse", True, r"\frac{x^2}{4}+\frac{y^2}{3}=1", "3x^2+4y^2=12",
        r"\frac{@x^2}{@a}+\frac{@y^2}{@b}=1", "@b@x^2+@a@y^2=@(a*b)"),
    Row("leading zeros", True, "4", "004", "@a", "00@a"),
    Row("signed set", True, r"\{-2,2\}", r"\{\pm 2\}", r"\{-@a,@a\}", r"\{\pm @a\}"),
]  # fmt: skip

# Reported to its maintainers.
REPORTED = [
    Row("powers of two", False, r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", r"\frac{1}{@p^{@b}}", r"\frac{1}{@p^{@a}}"),
    Row("named lists", False, "n=2, 3, 4", "n=1, 2, 3", "@x=@b, @c, @d", "@x=@a, @b, @c"),
    Row("named intervals", False, "D = (0, 1)", "D = (0, 1.5)", "@C = (0, @a)", "@C = (0, @a.5)"),
    Row("recurrences", False, r"F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1}", r"F_n = \sum_{k=0}^{n-2} F_k F_{n-k-2}",
        r"@C_n = \sum_{k=0}^{n-@a} @C_k @C_{n-k-@a}", r"@C_n = \sum_{k=0}^{n-@b} @C_k @C_{n-k-@b}"),
    Row("lists with and", False, r"19, 46, \text{ and } 82", "21, 36, and 82", r"@a, @c, \text{ and } @d",
        "@b, @c, and @d"),
    Row("large fractions", False, r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}",
        r"\frac{2^{20@a}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}"),
    Row("roman e, other sign", False, r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}",
        r"@a - \frac{1}{\mathrm{e}}", r"@a + \frac{1}{\mathrm{e}}"),
    Row("roman e", True, r"1 - \frac{1}{\mathrm{e}}", r"\frac{e-1}{e}", r"@a - \frac{@b}{\mathrm{e}}",
        r"\frac{@a e-@b}{e}"),
    Row("both signs", False, r"\pm 2021", "2021", r"\pm @a", "@a"),
    Row("clock times", False, "12:00", "1:00", "12:@a", "1:@a"),
    Row("patterns", False, r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1", r"@a, @b, \ldots, @k", r"@a, @c, \ldots, @k"),
    Row("long ratios", False, r"1:2:3:\ldots", r"1:4:9:\ldots", r"@a:@b:@c:\ldots", r"@a:@(b*b):@(c*c):\ldots"),
    Row("bare letters", False, "A", "B", "@C", "@D"),
    Row("inequality and interval", True, r"m \geq \sqrt{2}", r"m \in [\sqrt{2}, +\infty)",
        r"@x \geq \sqrt{@a}", r"@x \in [\sqrt{@a}, +\infty)"),
    Row("interval and inequality", True, r"[\sqrt{2}, +\infty)", r"m \geq \sqrt{2}", r"[\sqrt{@a}, +\infty)",
        r"@x \geq \sqrt{@a}"),
    Row("a subset", False, "$1$, $2$ and $3$", "$1$ and $3$", "$@a$, $@b$ and $@c$", "$@a$ and $@c$"),
    Row("equations, unlike", False, "3*x-1*y+13=0", "3x + 4y + 14=0", "@a*@x-@b*@y+@c=0", "@a@x + @b@y + @c=0"),
    Row("pi in plain text", True, r"\dfrac{\pi}{2}", "pi/2", r"\dfrac{\pi}{@a}", "pi/@a", False),
    Row("products in plain text", True, r"-2\pi", "-2*pi", r"-@a\pi", "-@a*pi", False),
    Row("exp in plain text", True, "e^{16} - 1", "-1 + exp(16)", "e^{@a} - @b", "-@b + exp(@a)", False),
    Row("complex in plain text", True, "14 - i", "14.0 + -1.0i", "@a - @b i", "@a.0 + -@b.0i", False),
    Row("bare gold fraction", True, r"\dfrac97", r"\frac{9}{7}", r"\dfrac{@a}{@b}", r"\frac{@a}{@b}"),
    Row("equivalent lines", True, "2x+4y-3=0", "y = -1/2*x + 3/4", "@a@x+@b@y-@c=0", r"@y = -\frac{@a}{@b}@x + @c/@b"),
    Row("numbers in text", True, "13", r"\text{13}", "@a", r"\text{@a}"),
    Row("percent words in the box", True, r"28\%", r"28 \text{ percent}", r"@a\%", r"@a \text{ percent}"),
    Row("markdown emphasis", True, "73", "Final Answer: **73**", "@a", "Final Answer: **@a**", False),
    Row("ellipses of two sizes", False, r"\frac{x^2}{4}+\frac{y^2}{3}=1", r"\frac{x^2}{16}+\frac{y^2}{12}=1",
        r"\frac{@x^2}{@a}+\frac{@y^2}{@b}=1", r"\frac{@x^2}{@(4*a)}+\frac{@y^2}{@(4*b)}=1"),
    Row("calls of a root", False, "4", r"4\sqrt(2)", "@a", r"@a\sqrt(2)"),
    Row("roots of fractions", True, r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}", r"\sqrt{@a/@x}",
        r"\frac{\sqrt{@a}}{\sqrt{@x}}"),
    Row("answer to nothing", False, "7", "", "@a", ""),
]  # fmt: skip

# Whole responses: where the answer stands.
RESPONSES = [
    Row("truncated thinking", False, "7", r"<think>maybe \boxed{7}", "@a", r"<think>maybe \boxed{@a}", False),
    Row("several boxes", False, "7", r"\boxed{7} or \boxed{8} or \boxed{9}", "@a",
        r"\boxed{@a} or \boxed{@b} or \boxed{@c}", False),
    Row("the last box", True, "9", r"\boxed{7}, no, \boxed{9}", "@b", r"\boxed{@a}, no, \boxed{@b}", False),
    Row("guesses in a box", False, "7", r"\boxed{7 \text{ or } 8}", "@a", r"\boxed{@a \text{ or } @b}", False),
    Row("guesses in a sentence", False, "7", "The answer is 7 or 8.", "@b", "The answer is @a or @b.", False),
    Row("guesses in prose", False, "7", "I would say that it must be 7 or 8", "@b",
        "I would say that it must be @a or @b", False),
    Row("hashes", True, "72", "6 x 12 = 72\n#### 72", "@a", "so many\n#### @a", False),
    Row("a sentence", True, "72", "Therefore, the final answer is $72$.", "@a",
        "Therefore, the final answer is $@a$.", False),
    Row("an explained answer", True, "72", "The answer is 72 because 6 times 12 is 72.", "@a",
        "The answer is @a because @b is larger.", False),
]  # fmt: skip


def cases():
    for row in MISJUDGED + JUDGED_WELL + REPORTED + RESPONSES:
        yield pytest.param(row.gold, row.answer, row.right, row.boxed, id=row.name)
        for variant in range(VARIANTS):
            values = draw(random.Random(f"{row.name} {variant}"))
            gold, answer = filled(row.gold_template, values), filled(row.answer_template, values)
            yield pytest.param(gold, answer, row.right, row.boxed, id=f"{row.name} {variant}")


@pytest.mark.parametrize(("gold", "answer", "right", "boxed"), list(cases()))
def test_the_verdict_is_right(gold, answer, right, boxed):
    verifier = get_verifier("math", "test")
    spec = {"kind": "math", "answer": gold}
    verifier.check(spec, "test")
    verdict = verifier.judge(spec, rf"so \boxed{{{answer}}}" if boxed else answer)
    assert (verdict.correct, verdict.error) == (right, None), (gold, answer, verdict)


def test_every_row_has_different_variants():
    for row in MISJUDGED + JUDGED_WELL + REPORTED + RESPONSES:
        made = {
            filled(row.gold_template + row.answer_template, draw(random.Random(f"{row.name} {i}")))
            for i in range(VARIANTS)
        }
        assert len(made) > 1, row.name
