r"""What counts as equal: the policy as a table. Its examples are tested; `policy_table` prints it for the docs.

Pairs are (gold answer, response's answer). A rule that is not symmetric treats the two sides differently on purpose.
"""

from dataclasses import dataclass

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rule:
    """One rule of the policy, with examples of what it accepts and what it refuses."""

    topic: str
    rule: str
    equal: Pairs
    unequal: Pairs
    symmetric: bool = True


POLICY = (
    Rule(
        "numbers",
        "Rational numbers are compared exactly, however small, large or written; nothing is rounded.",
        ((r"\frac{1}{2}", "0.5"), ("1200", r"1.2 \times 10^3"), (r"\frac{3}{2}", r"1\frac{1}{2}"),
         (r"0.\overline{3}", r"\frac{1}{3}"), ("072", "72")),
        ((r"\frac{1}{2004!}", r"\frac{1}{2006!}"), (r"\frac{1}{3}", "0.333333"), (r"\sqrt{2}", "1.414214")),
    ),
    Rule(
        "thousands",
        "A comma before three digits groups digits or separates two values, whichever the other side is.",
        (("1000", "1,000"), ("1000", "(1,000)"), ("1234", r"1\,234"), (r"\{12, 345\}", "12,345")),
        (("1000", "1,00"), (r"\{12, 345\}", "12,346"), ("(1, 2)", "1.2")),
    ),
    Rule(
        "finished values",
        "Where the gold answer is a finished number, a sum, difference or product of numbers is not an answer. "
        "Fractions, powers, roots, factorials, mixed numbers and scientific notation are finished.",
        (("1024", "2^{10}"), ("72", r"\frac{144}{2}"), ("2^{89}-1", "-1+2^{89}")),
        (("17", "16+1"), ("72", r"8 \cdot 9"), (r"\frac{5}{6}", r"\frac{1}{2}+\frac{1}{3}")),
        symmetric=False,
    ),
    Rule(
        "equations as answers",
        "`name = value` answers a bare value and the reverse. A chain of numbers has their value if it is true.",
        (("5", "x = 5"), ("x = 5", "5"), ("17", "12 + 5 = 17"), ("2x+1", "y = 2x+1"), ("3", "x + y = 3")),
        (("5", "7 = 5"), ("5", "2+2=4=5"), ("5", "x = 7 = 5"), ("x = 5", "y = 5"), ("0", "3x + 4y = 0"), ("x",
         "x = x")),
        symmetric=False,
    ),
    Rule(
        "equations",
        "Two equations are equal if they differ by a constant factor, or name the same thing with equal values.",
        (("2x+4y-3=0", r"y = -\frac{1}{2}x + \frac{3}{4}"), (r"\frac{x^2}{4}+\frac{y^2}{3}=1", "3x^2+4y^2=12")),
        (("3x - y + 13 = 0", "3x + 4y + 14 = 0"), ("D = (0, 1)", "D = (0, 1.5)"), ("x^2 = 4", "x = 2")),
    ),
    Rule(
        "names",
        "Letters are themselves, capital or small. Arguments of a defined function, its free parameters and letters "
        "declared by `\\in`, `where` or `for some` may be renamed, one to one.",
        (("f(x) = x+1", "f(t) = t+1"), ("P(x) = cx^2", "P(x) = kx^2"),
         (r"x = k\pi, k \in \mathbb{Z}", r"x = n\pi, n \in \mathbb{Z}"), (r"\{x \mid x > 2\}", r"\{t \mid t > 2\}")),
        (("A", "a"), ("n + 1", "k + 1"), ("f(x) = ax + b", "f(x) = ax + a"),
         (r"k\pi, k \in \mathbb{Z}", r"n\pi, n \in \mathbb{N}")),
    ),
    Rule(
        "several values",
        "A bare list (comma, semicolon, `and`, `or`, `\\pm`) has no order and is a set; a tuple or vector has order "
        "and is no set. Between list and tuple the order counts. All values must be there and no others.",
        ((r"\{1, 2, 3\}", "3, 1, 2"), ("1331 and 1728", "1728, 1331"), ("(1, 2)", "1, 2"),
         (r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}", r"\frac{-1 \pm \sqrt{17}}{2}"),
         (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1, 2)"), ("n = 2, 3", "3, 2"), ("a = 1, b = 2", "(1, 2)")),
        ((r"\{1, 2, 3\}", "(3, 2, 1)"), ("(1, 2)", "(2, 1)"), ("1331 and 1728", "1728"), (r"\pm 5", "5"), ("7",
         "7 or 8"),
         ("n = 2, 3, 4", "n = 1, 2, 3"), ("a = 1, b = 2", "2, 1")),
    ),
    Rule(
        "intervals",
        "Intervals, inequalities in one letter and their set notation are the same thing; open is not closed.",
        ((r"\{x \mid x > 2\}", r"(2, \infty)"), ("(1, 2]", r"1 < x \le 2"), ("x > 2", "2x > 4"),
         (r"(-\infty, 1) \cup (2, \infty)", r"x < 1 \text{ or } x > 2"), (r"\mathbb{R} \setminus \{2\}", r"x \ne 2")),
        (("(1, 2)", "[1, 2]"), ("x > 2", "y > 2"), ("x > 2", r"x \ge 2"), ("x > 2", "2")),
    ),
    Rule(
        "units",
        "Known units are converted, exactly, within a dimension. A unit that one side leaves out does not matter. "
        "Words that are no unit must not differ.",
        ((r"5\text{ km}", r"5000\text{ m}"), (r"5\text{ cm}", "5"), ("72", r"72\text{ clips}"), (r"\$5", "500 cents"),
         (r"36\text{ km/h}", r"10\text{ m/s}"), (r"1\text{ L}", r"1000\text{ cm}^3")),
        ((r"5\text{ cm}", r"5\text{ m}"), (r"5\text{ m}", r"5\text{ m}^2"), ("3 boys", "3 girls"), ("5", "5m")),
    ),
    Rule(
        "percent",
        "The percent sign is one hundredth. A percentage may be answered without the sign, a plain number not with it.",
        ((r"28\%", "0.28"), (r"28\%", "28"), ("0.28", r"28\%"), (r"28\%", "28 percent"), (r"\frac{1}{4}", r"25\%")),
        (("28", r"28\%"), (r"28\%", "2.8")),
        symmetric=False,
    ),
    Rule(
        "angles",
        "A degree is pi / 180; the sign may be left out or added like a unit.",
        ((r"90^\circ", r"\frac{\pi}{2}"), (r"\frac{\pi}{2}", r"90^\circ"), ("90", r"90^\circ"), (r"90^\circ", "90")),
        ((r"90^\circ", r"\pi"), (r"\frac{\pi}{2}", r"45^\circ"), (r"\frac{\pi}{2}", "90")),
    ),
    Rule(
        "ratios",
        "Ratios are compared as proportions, `a:b` also as the number a/b; clock times literally.",
        (("1:2", "2:4"), ("1:2", r"\frac{1}{2}"), ("2:3:4", "4:6:8")),
        (("1:2", "2:1"), ("12:00", "1:00"), ("12:00", "6:00"), ("1:2:3", "1:2:4")),
    ),
    Rule(
        "expressions",
        "Expressions are equal if their values are, to 40 digits, for all values of their letters; the domain is the "
        "real numbers. `\\log` without a base is natural or decimal, whichever makes the sides equal; `e` and `i` are "
        "constants.",
        ((r"2\sqrt{3}", r"\sqrt{12}"), (r"\log 2", r"\ln 2"), (r"\log 100", "2"), (r"\sqrt{-1}", "i"),
         (r"1-\frac{1}{\mathrm{e}}", r"\frac{e-1}{e}"), (r"\frac{\pi}{2}", "pi/2"), ("e^{16}-1", "-1 + exp(16)"),
         ("14 - i", "14.0 + -1.0i"), (r"\overline{AB}", "AB")),
        ((r"\ln 100", "2"), (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"), (r"\sqrt{x^2}", "x"),
         (r"\frac{\sqrt{2}}{30!}", r"\frac{\sqrt{2}}{32!}"), ("2x", "3x")),
    ),
    Rule(
        "words",
        "Words are compared without case and spacing; an answer with prose around its mathematics only as text.",
        (("Yes", r"\text{yes}"), ("no solutions", "No  solutions")),
        (("Yes", "No"), ("odd $n$", "even $n$"), ("Yes", "1")),
    ),
)  # fmt: skip


def policy_table() -> str:
    """The policy in Markdown: one row a rule, examples as `gold answer` and `answer`."""

    def shown(pairs: Pairs) -> str:
        return "; ".join(f"`{gold}` / `{answer}`" for gold, answer in pairs).replace("|", r"\|")

    rows = [
        f"| {rule.topic} | {rule.rule}{'' if rule.symmetric else ' Not symmetric.'} | {shown(rule.equal)} "
        f"| {shown(rule.unequal)} |"
        for rule in POLICY
    ]
    return "\n".join(["| topic | rule | equal | not equal |", "|---|---|---|---|", *rows])
