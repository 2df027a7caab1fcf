r"""One spelling for what LaTeX, Unicode and Markdown write in many ways: ½, \dfrac12 and \tfrac{1}{2}.

Each rule changes the spelling only, never the meaning. Texts have at most ``normalize.MAX_CHARACTERS``
characters.
"""

from __future__ import annotations

import itertools
import re
import unicodedata

DOLLAR = "\u00a4"
"""The currency, since dollar signs in LaTeX are delimiters and are removed."""

_NAMES = (
    "alpha beta gamma delta theta lambda mu mu pi rho sigma phi omega Omega Omega Delta times div cdot cdot "
    "pm mp le le ge ge ne approx equiv infty emptyset cup cap in wedge vee angle langle rangle"
)
_SIGNS = (
    "αβγδθλ\u03bc\u00b5π\u03c1\u03c3φω\u03a9\u2126Δ\u00d7\u00f7\u00b7\u22c5\u00b1\u2213\u2264\u2a7d\u2265\u2a7e"
    "\u2260\u2248\u2261\u221e\u2205\u222a\u2229\u2208\u2227\u2228\u2220\u27e8\u27e9"
)
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),  # minus and dashes
        **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2018\u2019\u2032", "'"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003\u200a", " "),
        **dict.fromkeys("\u200b\u2060\ufeff", None),
        **dict(zip("\u3001\u3002\u2217\u2223", ",.*|", strict=True)),
        **{"\u2026": "...", "\u211d": r"\mathbb{R}", "\u00b0": r"^\circ "},
        **{sign: f"\\{name} " for sign, name in zip(_SIGNS, _NAMES.split(), strict=True)},
    }
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_PLAIN = "0123456789+-n"
_UNICODE_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))")
_STRUCK = re.compile(r"~~[^~]*~~")
_EMPHASIS = re.compile(r"(?<![\w*])(\*\*|\*|__)(?=[^\s*_])([^*]*?)(?<=[^\s*])\1(?![\w*])")

# Replacements of LaTeX commands; empty for commands without meaning, such as \left and \displaystyle.
_COMMANDS = {
    name: command
    for command, names in {
        r"\frac": "dfrac tfrac cfrac",
        r"\binom": "dbinom tbinom",
        r"\le": "leq leqslant",
        r"\ge": "geq geqslant",
        r"\emptyset": "varnothing O",
        r"\approx": "sim thickapprox",
        r"^\circ ": "degree degrees",
        "|": "lvert rvert vert mid",
        "...": "dots ldots cdots",
        " ": "quad qquad enspace thinspace",
        "": "left right displaystyle textstyle limits big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr "
        "bf rm",
    }.items()
    for name in names.split()
}
_COMMANDS |= {"neq": r"\ne", "land": r"\wedge", "lor": r"\vee", "varphi": r"\phi", "iff": r"\iff"}
_COMMANDS |= {"lbrace": r"\{", "rbrace": r"\}", "lt": "<", "gt": ">", "colon": ":", "ast": "*"}
_COMMANDS |= {"pounds": "\u00a3", "euro": "\u20ac", "yen": "\u00a5"}
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_TEXT = (
    r"text|textbf|textit|textrm|textsf|texttt|textup|textnormal|mathrm|mathsf|mathit|mathtt|mbox|hbox|emph"
)
_WRAPPER = re.compile(rf"\\(?:{_TEXT})\s*\{{([^{{}}]*)\}}")
_WRAPPERS = re.compile(
    rf"\\(?:{_TEXT}|boxed|fbox|underline|phantom|mathord|mathbf|boldsymbol|bm|vec|hat|over|bar)"
)
_BOX = re.compile(r"\\(?:boxed|fbox|underline|phantom|mathord)\s*\{([^{}]*)\}")
_OPERATOR = re.compile(r"\\operatorname\*?\s*\{([a-zA-Z]+)\}")
_COLOUR = re.compile(r"\\(?:text)?color\s*(?:\[[a-z]*\])?\{[^{}]*\}")
_ACCENT = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|vec|hat|overrightarrow|mathbf)\s*(?:\{([^{}]*)\}|([a-zA-Z]))"
)
_BAR = re.compile(r"\\(?:overline|bar)\s*\{([A-Za-z]+)\}")
_SPACE = re.compile(r"\\[,;:> ]|~(?!~)|\\!|\\\n")
_MOD = re.compile(r"\\(?:[bp]?mod|(?:operatorname|mathrm|text)\s*\{\s*mod\s*\})(?![A-Za-z])")
_REAL = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z])|all real numbers|the reals", re.IGNORECASE)

# 1/2 may follow the command without braces: \frac12, \frac 1x, \sqrt 2, \frac{a}b.
_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|[0-9a-zA-Z])\s*(?=(\{|[0-9a-zA-Z]))")
_SECOND = re.compile(r"(\\frac\{[^{}]*\})([0-9a-zA-Z])")
_ROOT = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*([0-9a-zA-Z])")
_SHORT_GROUP = re.compile(r"([\^_])\s*\{\s*([0-9a-zA-Z])\s*\}")
_LOG_ARGUMENT = re.compile(r"(\\log_(?:[0-9a-zA-Z]|\{[^{}]*\}))\s*\{([^{}]*)\}")

# Functions and constants without a backslash: sqrt(5), 2*pi, sin x, infinity.
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|ln|log|pi|theta|gcd|lcm)(?![A-Za-z])"
)
_SQRT = re.compile(r"(?<![\\A-Za-z])sqrt\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+))")
_EXP = re.compile(r"\\?(?<![A-Za-z])exp\s*\(([^()]*)\)")
_CHOOSE = re.compile(  # C(5,2), 5C2, {}_5C_2, C_5^2, 5 \choose 2
    r"(?<![A-Za-z\\])C\((\d+), ?(\d+)\)|(?<![\w.])[_^]?\{?(\d+)\}? ?C_?\{?(\d+)\}?(?!\w)"
    r"|(?<![A-Za-z\\])C_\{?(\d+)\}? ?\^\{?(\d+)\}?|\{?(\d+) ?\\choose ?(\d+)\}?"
)
_ANGLE = r"(\d+(?:\.\d+)?) ?\^\{?\\circ ?\}?"
_DEGREES = re.compile(rf"(\\(?:sin|cos|tan|sec|csc|cot)) ?(?:\({_ANGLE}\)|\{{{_ANGLE}\}}|{_ANGLE})")
_INFINITY = re.compile(r"(?<![\\A-Za-z])(?:\+\s*)?(?:inf|infinity)(?![A-Za-z])", re.IGNORECASE)
_POWER = re.compile(r"\^\s*\(([^()]*)\)|\^(-?\d{2,}|-\d)")
_POWER_OF_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\^)")
_LETTERS_OR_SIGNS = re.compile(r"[A-Za-z^<>={*~]|!=|\d ")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")
_RELATIONS = (("<=", r"\le "), (">=", r"\ge "), ("!=", r"\ne "), (r"\not=", r"\ne "), (r"\not =", r"\ne "))

_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3}(?:[ ]\d{3})+)(?![\d,]|[ ]\d|\.\d+[ ,]\d)")
_COMMA_GROUPS = re.compile(r"(?<![\d.,(\[{])(\d{1,3}(?:,\d{3})+)(?![\d,)\]}])")
_BRACED_GROUPS = re.compile(r"(?<![\d.,}])(\d{1,3}(?:\{,\}\d{3})+)(?!\d|\{,\})")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_E_NOTATION = re.compile(r"(?<![A-Za-z\d.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?![\d.A-Za-z])")
_END = re.compile(
    r"(?:\s*(?:<[|\uff5c][^<>\n]{1,40}[|\uff5c]>|</?(?:s|eos|answer|think|end_of_turn|start_of_turn)>|\[EOS\]))+\s*$"
)


def strip_end_tokens(text: str) -> str:
    """Remove tokens that end a response: ``<|im_end|>``, ``</s>``, ``</answer>``."""
    return _END.sub("", text) if text.rstrip()[-1:] in ("]", ">") else text


def normalise_spelling(text: str) -> str:
    r"""The text in plain LaTeX: a single spelling of each command; no delimiters, wrappers or emphasis."""
    text = strip_end_tokens(text)
    if not text.isascii():
        text = _from_unicode(text)
    text = _markdown(text)
    text = _dollars(text)
    if "\\" in text or "~" in text:
        text = _latex(text)
    text = (
        r"\emptyset"
        if text.strip() == "{}"
        else text.replace(r"\%", "%").replace("{}", "").replace("{:}", ":")
    )
    if not _LETTERS_OR_SIGNS.search(text):
        return _without_stop(text.strip())
    for written, spelt in _RELATIONS:
        text = text.replace(written, spelt)
    if "sqrt" in text or "exp" in text:
        text = _SQRT.sub(lambda m: f"\\sqrt{{{m[1] or m[2] or m[3]}}}", text)
        text = _EXP.sub(r"e^{\1}", text)
    if _WORD.search(text):
        text = _FUNCTION.sub(r"\\\1 ", _INFINITY.sub(r"\\infty ", text))
    if "^" in text or "**" in text:
        text = text.replace("**", "^")
        text = _POWER.sub(lambda m: f"^{{{m[1] or m[2]}}}", text)
        text = _POWER_OF_TEN.sub(r"\\times ", text)
        text = _DEGREES.sub(lambda m: f"{m[1]}(\\frac{{{m[2] or m[3] or m[4]}\\pi}}{{180}})", text)
    if "C" in text or "choose" in text:
        text = _CHOOSE.sub(_binomial, text)
    if "{" in text:
        text = _SHORT_GROUP.sub(r"\1\2", text)
        if "{,}" in text:
            text = _BRACED_COMMA.sub(".", _BRACED_GROUPS.sub(lambda m: m[1].replace("{,}", ""), text))
    text = " ".join(text.split())
    if " " in text:
        text = _GROUPS.sub(lambda m: m[1].replace(" ", ""), text)
    if "e" in text or "E" in text:
        text = _E_NOTATION.sub(lambda m: f"{m[1]} \\times 10^{{{int(m[2])}}}", text)
    return _without_stop(text)


def bracket_depths(text: str) -> list[int]:
    """The nesting depth of brackets after each character; below 0 where more are closed than opened."""
    return list(itertools.accumulate((c in "([{") - (c in ")]}") for c in text))


def _without_stop(text: str) -> str:
    """Without punctuation at its end; the dots of 0.333... stay."""
    return text if text.endswith("...") else text.rstrip(".,;: ").strip()


def join_comma_groups(text: str) -> str:
    """Thousands separators removed: 1,234,567. Not for the inside of brackets, where commas separate."""
    return _COMMA_GROUPS.sub(lambda m: m[1].replace(",", ""), text) if "," in text else text


def _from_unicode(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for raised, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        text = re.sub(
            f"[{raised}]+",
            lambda m: f"{mark}{{{m[0].translate(str.maketrans(raised, _PLAIN))}}}",  # noqa: B023
            text,
        )
    parts = []
    for character in text:
        form = unicodedata.normalize("NFKC", character)
        if "\u2044" in form and len(form) == 3:  # a vulgar fraction
            form = f"\\frac{{{form[0]}}}{{{form[2]}}}"
        parts.append(form)
    text = "".join(parts).translate(_CHARACTERS)
    return _UNICODE_ROOT.sub(
        lambda m: f"\\sqrt{'[3]' if m[1] == '∛' else ''}{{{m[2] if m[2] is not None else m[3]}}}", text
    )


def _markdown(text: str) -> str:
    if "`" in text:
        text = text.replace("`", "")
    if "~~" in text:
        text = _STRUCK.sub(" ", text)
    if "*" in text or "__" in text:
        text = _EMPHASIS.sub(r"\2", text)
    text = text.strip(" \t\r\n*_")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return text.strip()


def _dollars(text: str) -> str:
    r"""``\$`` and a lone dollar before a number are the currency; all others delimit LaTeX."""
    if "$" not in text:
        return text
    text = text.replace("\\$", DOLLAR)
    if text.count("$") % 2:
        text = re.sub(r"^(-?\s*)\$(?=\s*-?[\d.])", rf"\1{DOLLAR}", text)
    return text.replace("$", " ")


def _latex(text: str) -> str:
    text = text.replace("\\\\", "\\cr " if "\\begin" in text else " ")
    text = re.sub(r"\\[()\[\]](?!\d+(?:pt|em|ex|mm)\b)", " ", text)
    if "mod" in text:
        text = _MOD.sub(" mod ", text)
    if "color" in text or "operatorname" in text:
        text = _COLOUR.sub("", _OPERATOR.sub(r"\\\1", text))
    for _ in range(8 if _WRAPPERS.search(text) else 0):  # innermost braces first; any text may come
        shorter = _BOX.sub(r"\1", _BAR.sub(r"\1", _ACCENT.sub(_accent, _WRAPPER.sub(r" \1 ", text))))
        if shorter == text:
            break
        text = shorter
    text = _COMMAND.sub(_command, text)
    text = _SPACE.sub(lambda m: "" if m[0] == "\\!" else " ", text)
    if "math" in text or "real" in text or "\\R" in text:
        text = _REAL.sub(r"(-\\infty,\\infty)", text)
    if "\\sqrt" in text:
        text = _ROOT.sub(r"\\sqrt\1{\2}", text)
    for _ in range(6 if "\\frac" in text else 0):  # from the inside, as an argument may hold fractions
        longer = _SECOND.sub(r"\1{\2}", _FRACTION.sub(_numerator, text))
        if longer == text:
            break
        text = longer
    return _LOG_ARGUMENT.sub(r"\1(\2)", text) if "log_" in text else text


def _command(match: re.Match[str]) -> str:
    return _COMMANDS.get(match[1], match[0])


def _accent(match: re.Match[str]) -> str:
    r"""Remove bold and hats, except on the unit vectors i, j and k: \mathbf{i}."""
    inside = (match[1] or match[2] or "").strip()
    inside = {"\\imath": "i", "\\jmath": "j"}.get(inside, inside)
    return f"\\unit_{inside} " if inside in ("i", "j", "k") else inside


def _binomial(match: re.Match[str]) -> str:
    n, k = (g for g in match.groups() if g)
    if match[6]:  # C_5^2 has the smaller number above
        n, k = max(n, k, key=int), min(n, k, key=int)
    return f"\\binom{{{n}}}{{{k}}}" if int(k) <= int(n) else match[0]


def _numerator(match: re.Match[str]) -> str:
    first = match[1] if match[1].startswith("{") else f"{{{match[1]}}}"
    return f"\\frac{first}"
