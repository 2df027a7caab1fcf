"""Each sentence of docs/security.md, and of that in evidence/, has a test, or a reason why it has none.

Why: a page on security that is wrong is worse than none, and nobody notices when code changes. A line of
``tests/data/security_statements.txt`` has tests, or ``limit:`` with a reason, then parts of sentences that
they support. Proved: each sentence, and each statement in a cell of a table, has such a part; each part is on
the page once; each test exists. Not covered: whether a test proves the whole sentence; that is for the reader
of both.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TABLE = (ROOT / "tests/data/security_statements.txt").read_text(encoding="utf-8")
PAGE = "\n".join(
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("security.md", "evidence/security.md")
)
NO_STATEMENTS = {"no", "none", "the same", ""}


def blocks(page: str) -> list[str]:
    """Paragraphs, list items and rows of tables, each in one line; neither headings nor heads of tables."""
    page = re.sub(r"^\|.*\n\|[-|]+\n", "", page, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=- |\|)", page)
    return [" ".join(part.split()) for part in parts if part.strip() and not part.startswith("#")]


def statements(block: str) -> list[tuple[int, int]]:
    """Where the statements of a block begin and end: sentences; in tables, also what semicolons part."""
    if not block.startswith("|"):
        ends = [m.end() for m in re.finditer(r"[.:](?=\s+[A-Z`*])|$", block)]
    else:  # the first cell says what the row is about
        first = block.index("|", 1)
        ends = [first, *(m.end() for m in re.finditer(r"\||;|\.(?=\s[A-Z])", block) if m.end() > first)]
    spans = [
        (a, b)
        for a, b in zip([0, *ends], ends, strict=False)
        if block[a:b].strip(" |;.") not in NO_STATEMENTS
    ]
    return spans[1:] if block.startswith("|") else spans


def entries(table: str) -> list[tuple[list[str], list[str]]]:
    """Tests, or a limit, and the parts of the page that they support."""
    rows = [line.split(" ¦ ") for line in table.splitlines()]
    return [(tests.split(" + "), parts) for tests, *parts in rows]


def missing_from(page: str, table: str) -> list[str]:
    """Statements of a page that no part of the table covers, and parts that are not there just once."""
    lines = blocks(page)
    parts = [part for _, texts in entries(table) for part in texts]
    problems = [part for part in parts if sum(line.count(part) for line in lines) != 1]
    for line in lines:
        covered = [(at, at + len(part)) for part in parts if (at := line.find(part)) >= 0]
        problems += [line[a:b] for a, b in statements(line) if not any(x < b and a < y for x, y in covered)]
    return problems


def test_each_statement_has_a_test_or_a_reason() -> None:
    assert missing_from(PAGE, TABLE) == []


def test_each_test_exists() -> None:
    tests = [name for names, _ in entries(TABLE) for name in names if not name.startswith("limit: ")]
    functions = {}
    for file in {name.partition("::")[0] for name in tests}:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        functions[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [name for name in tests if name.partition("::")[2] not in functions[name.partition("::")[0]]] == []


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("\nNothing can happen. It is safe.\n", ["Nothing can happen.", "It is safe."]),
        ("| x | no | it is closed; none |\n", ["it is closed;"]),
        ("- It is open: others see it\n", ["- It is open: others see it"]),
        ("\n## A heading\n\n| head | of a table |\n|---|---|\n| first | no |\n", []),
    ],
)
def test_a_sentence_without_a_test_is_found(added: str, expected: list[str]) -> None:
    assert [text.strip(" |") for text in missing_from(PAGE + added, TABLE)] == expected
    assert missing_from(PAGE.replace("encrypted |", "|"), TABLE) != []


def test_packages_are_pinned() -> None:
    names, used = set(), set()
    for file in (ROOT / "requirements").glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith(("#", "    --hash=")):
                match = re.match(r"([\w.-]+)(\[[\w,-]+\])?(==| @ )\S+", line)
                assert match, f"{file.name}: {line}"
                names.add(match[1].lower())
                if file.name != "dev.txt":
                    used.add(match[1].lower())
    assert len(names) > 100
    assert "kernels" not in names
    assert "peft" not in used
