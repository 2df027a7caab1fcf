"""Handles words around an answer: "The total is 18.", "18 because ...", "about 5", "five"."""

from __future__ import annotations

import re

from rpg_megatron.rewards.units import MULTIPLIERS, parse_unit

# Text after the answer, with its reason: "18 because 36 / 2 = 18", "20, as required".
_REASON = re.compile(
    r"(?<=[\w})\]%$'])[,;:.]?\s+(?:(?:because|since|where|hence|therefore|thus)\b"
    r"|as\s+(?:required|desired|we|the)\b"
    r"|which\s+(?:is|was|gives|means|makes)\b|[Ii] hope\b).*$",
    re.DOTALL,
)
_NEXT_SENTENCE = re.compile(r"(?<=[\w})\]%$]{2})\.\s+[A-Z][a-z' ].*$|(?<=\d)\.\s+[A-Z][a-z' ].*$", re.DOTALL)
# A remark in brackets, such as "18 (eggs)", that does not change the answer, as "15 (or maybe 16)" does.
_REMARK = re.compile(
    r"\s+\((?!or\b|maybe|mod\b|base\b|if\b|and\b|in\b|times|approx|not sure)"
    r"([A-Za-z][A-Za-z,' -]{2,}[^()]*)\)$"
)
_SCALES = re.compile(r"\b(?:thousand|million|billion|dozen|hundred|percent|multiplicity)", re.IGNORECASE)
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|finally|we (?:have|get|find|obtain)|final answer|answer|solution)\b"
    r"[,:]?\s+"
    r"|(?:the )?(?:final |correct )?answer is\b:?\s*|(?:it|this|that) is\s+|=\s*)+",
    re.IGNORECASE,
)
_ABOUT = re.compile(
    r"(?:(?:about|at|approximately|approx\.?|roughly|around|nearly|exactly|a total of|only|just)\s+"
    r"|\\approx\s*|~\s*)+(?=[-\d.\\¤£€¥({])",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"^[A-Za-z][A-Za-z' ,-]*?\s(?:is|are|was|were|equals|becomes)\s+(?:equal to\s+)?(.+)$", re.DOTALL
)
_NEGATIVE = re.compile(r"^(?:negative|minus)\s+(?=[\d\\a-z(])", re.IGNORECASE)
_PLUS_MINUS = re.compile(r"\bplus or minus\b", re.IGNORECASE)
_NOT_AN_ANSWER = re.compile(
    r"\b(?:not|never|cannot|can't|isn't|aren't|don't|or|either|maybe|perhaps|between|than|least|most|except"
    r"|unless|if|depends?|below|above|under|over|off|more|less|fewer|up)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ONE_NUMBER = re.compile(
    r"(?<![\w\\.,/^])-?[¤£€¥]?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+|(?::\d+)+)?%?(?![\w^/]|:\d)"
)

# Words after a number that change its value or meaning, so they are kept.
_CHANGING_WORDS = (
    "squared cubed factorial and or plus minus times mod modulo base choose over divided percentage "
    "not per off less more fewer than below above under root square cube pi theta alpha beta pair "
    "couple pairs couples percent to by with from of out at in on is are was degrees radians log ln "
    "sin cos tan x through thru until till"
)
_CHANGING = frozenset(_CHANGING_WORDS.split())
# A unit or noun may have an ending without meaning: "1.2 kg in total", "14 days left".
_NOUNS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z][A-Za-z'-]*){0,5}")
_ENDING = re.compile(r"\s+(?:in total|in all|altogether|total|left|each|overall)$")

_SMALL_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_SMALL = _SMALL_WORDS.split()
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NUMBERS = {word: n for n, word in enumerate(_SMALL)} | {
    f"{ten}{join}{unit}" if n else ten: 10 * (i + 2) + n
    for i, ten in enumerate(_TENS)
    for n, unit in enumerate(_SMALL[:10])
    for join in ("-", " ")
}
"""Numbers in words, up to ninety-nine."""

_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=[A-Za-z])", re.IGNORECASE)
_CAPITALS = re.compile(r"[A-Z]{2,4}")
_SAME_WORDS = {
    "dne": "does not exist",
    "infinitely many solutions": "infinitely many",
    "infinite solutions": "infinitely many",
    "none of these": "none of the above",
}
_GENERIC = re.compile(r" (?:triangle|function|number|angle|sequence|series|curve|graph)$")
NO_SOLUTION = re.compile(
    r"(?:there (?:is|are|exists?) |(?:[a-z]+ ){1,3}(?:has|have) )?no (?:such |real )?"
    r"(?:solutions?|roots?|values?|numbers?|x)(?: exists?)?|(?:the )?empty(?: set)?|none",
    re.IGNORECASE,
)
"""Words for the empty set of solutions."""
_FREE_CASE = {"YES", "NO", "TRUE", "FALSE", "NONE", "ODD", "EVEN", "DNE", "EAST", "WEST"}


def extract_core(text: str) -> str:
    """The answer without lead-in, reason, remark or sentence; text that is not understood is unchanged."""
    if text.isdigit() or (not _WORD.search(text) and "~" not in text and "approx" not in text):
        return text
    text = _PLUS_MINUS.sub(r"\\pm", text)
    if not re.match(r"(?:if|when)\b", text, re.IGNORECASE):
        text = _NEXT_SENTENCE.sub("", _REASON.sub("", text))
    remark = _REMARK.search(text)
    if remark and not _SCALES.search(remark[1]):
        text = text[: remark.start()]
    text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
    text = _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text
    text = _NEGATIVE.sub("-", text)
    if not _NOT_AN_ANSWER.search(text):
        sentence = _VERB.match(text)
        if sentence and not any(c in sentence[1] for c in "=<>"):
            return extract_core(sentence[1].strip()) if len(sentence[1]) < len(text) else text
        if len(_WORD.findall(text)) >= 2 and text[:1].isalpha() and not any(c in text for c in "\\=<>()[]{}"):
            numbers = list(_ONE_NUMBER.finditer(text))
            if len(numbers) == 1 and re.search(r"[a-z]", text[: numbers[0].start()]):
                return text[numbers[0].start() :].strip()
    return text.strip()


def drop_nouns(tail: str) -> str | None:
    """The part to keep of the words after a number: "" for "red marbles", a multiplier's first word, or a
    unit.

    None if a word changes the value or is not known to be irrelevant.
    """
    shorter = _ENDING.sub("", tail)
    if shorter != tail and parse_unit(shorter):
        return shorter
    if _NOUNS.fullmatch(tail) is None:
        return None
    words = tail.split()
    if multiplier(words[0]) is not None:
        rest = " ".join(words[1:]).removeprefix("of ")
        return words[0] if not rest or drop_nouns(rest) == "" else None
    if words[0].lower() == "of" and len(words) > 1:  # 2/5 of the land
        words = words[1:] if words[1].lower() in ("the", "all") else ["-"]
    if (words[0].lower() in _CHANGING) or (len(words) > 1 and words[1].lower() in ("theta", "pi", "than")):
        return None
    if any(re.fullmatch(r"[a-z]+ths?|short", w) or w.removesuffix("s") in NUMBERS for w in words[:2]):
        return None
    if len(words[0]) < 2 or any(
        w.lower() in ("or", "and", "not", "plus", "minus", "times", "than", "off") for w in words
    ):
        return None
    if len(words) > 1 and any(multiplier(w) is not None for w in words[:2]):
        return None
    return ""


def multiplier(word: str) -> str | None:
    """The key of a word in ``MULTIPLIERS``; None if it is not one."""
    word = word.lower()
    return next((key for key in (word, word.removesuffix("s")) if key in MULTIPLIERS), None)


def canonical_words(text: str) -> str:
    """Words in a normal form: no article, lower case except for labels such as ABC."""
    text = _ARTICLE.sub("", text.strip(" \"'."))
    if _CAPITALS.fullmatch(text) and text not in _FREE_CASE:
        return text
    text = text.lower()
    return _GENERIC.sub("", _SAME_WORDS.get(text, text))
