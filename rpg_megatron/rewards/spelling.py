r"""One spelling for what LaTeX, Unicode and Markdown write in many ways: ½, \dfrac12 and \tfrac{1}{2}.

Each rule changes the spelling only, never the meaning. Texts have at most ``normalize.MAX_CHARACTERS``
characters.
"""

from __future__ import annotations

import re
import unicodedata

DOLLAR = "\u00a4"
"""The currency, since dollar signs in LaTeX are delimiters and are removed."""

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),  # minus and dashes
        **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2018\u2019\u2032", "'"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003\u200a", " "),
        **dict.fromkeys("\u200b\u2060\ufeff", None),
        "\u3001": ",",
        "\u3002": ".",
        "\u00d7": r"\times ",
        "\u00f7": r"\div ",
        "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ",
        "\u2217": "*",
        "\u00b1": r"\pm ",
        "\u2213": r"\mp ",
        "\u2264": r"\le ",
        "\u2a7d": r"\le ",
        "\u2265": r"\ge ",
        "\u2a7e": r"\ge ",
        "\u2260": r"\ne ",
        "\u2248": r"\approx ",
        "\u221e": r"\infty ",
        "\u2205": r"\emptyset ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "\u2208": r"\in ",
        "\u211d": r"\mathbb{R}",
        "\u2223": "|",
        "\u2227": r"\wedge ",
        "\u2228": r"\vee ",
        "\u00b0": r"^\circ ",
        "\u2220": r"\angle ",
        "\u2026": "...",
        "\u27e8": r"\langle ",
        "\u27e9": r"\rangle ",
        "\u2126": r"\Omega ",
        "\u00b5": r"\mu ",
        **{
            chr(code): f"\\{name} "
            for code, name in zip(
                (
                    0x3B1,
                    0x3B2,
                    0x3B3,
                    0x3B4,
                    0x3B8,
                    0x3BB,
                    0x3BC,
                    0x3C0,
                    0x3C1,
                    0x3C3,
                    0x3C6,
                    0x3C9,
                    0x3A9,
                    0x394,
                ),
                [
                    "alpha",
                    "beta",
                    "gamma",
                    "delta",
                    "theta",
                    "lambda",
                    "mu",
                    "pi",
                    "rho",
                    "sigma",
                    "phi",
                    "omega",
                    "Omega",
                    "Delta",
                ],
                strict=True,
            )
        },
    }
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_PLAIN = "0123456789+-n"
_UNICODE_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))")
_STRUCK = re.compile(r"~~[^~]*~~")
_EMPHASIS = re.compile(r"(?<![\w*])(\*\*|\*|__)(?=[^\s*_])([^*]*?)(?<=[^\s*])\1(?![\w*])")

# Replacements of LaTeX commands; empty for commands without meaning, such as \left and \displaystyle.
_COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("leq", "leqslant"), r"\le"),
    **dict.fromkeys(("geq", "geqslant"), r"\ge"),
    "neq": r"\ne",
    **dict.fromkeys(("varnothing", "O"), r"\emptyset"),
    "lbrace": r"\{",
    "rbrace": r"\}",
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("left", "right", "displaystyle", "textstyle", "limits"), ""),
    **dict.fromkeys(("big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr"), ""),
    **dict.fromkeys(("quad", "qquad", "enspace", "thinspace"), " "),
    **dict.fromkeys(("degree", "degrees"), r"^\circ "),
    **dict.fromkeys(("dots", "ldots", "cdots"), "..."),
    **dict.fromkeys(("land",), r"\wedge"),
    **dict.fromkeys(("lor",), r"\vee"),
    "lt": "<",
    "gt": ">",
    "sim": r"\approx",
    "thickapprox": r"\approx",
    "colon": ":",
    "ast": "*",
    "varphi": r"\phi",
    "pounds": "\u00a3",
    "euro": "\u20ac",
    "yen": "\u00a5",
    "bf": "",
    "rm": "",
    "iff": r"\iff",
}
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
    text = text.replace(r"\%", "%").replace("{}", "")
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


def _numerator(match: re.Match[str]) -> str:
    first = match[1] if match[1].startswith("{") else f"{{{match[1]}}}"
    return f"\\frac{first}"
