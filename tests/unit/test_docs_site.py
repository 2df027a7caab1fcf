"""The documentation: each page is in the navigation of its site, and each link leads to a file and a heading.

Why: ``make docs`` checks the same, but needs packages that the tests do without. Not covered: links to other
sites.
"""

import ast
import posixpath
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md"), *ROOT.glob("docs/evidence/*.md"))
PAGES = sorted(f.relative_to(ROOT).as_posix() for f in FILES)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s:]*)(?:#([^)\s]*))?\)")


def outside_pages() -> dict[str, str]:
    """Pages outside ``docs/`` that the site has, and their places on it."""
    for node in ast.parse((ROOT / "tools" / "docs_site.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES":
            return dict(ast.literal_eval(node.value))
    raise AssertionError


def without_code(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as code hosting sites make them."""
    names = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.lower())
        names.add(plain.strip().replace(" ", "-"))
    return names


def test_each_page_is_in_the_navigation_once() -> None:
    listed = re.findall(
        r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    expected = [f.name for f in (ROOT / "docs").glob("*.md")] + list(outside_pages().values())
    assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page: str) -> None:
    broken = []
    for link, anchor in LINK.findall(without_code(page)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) if link else page
        if not (ROOT / target).exists() or (
            anchor and target.endswith(".md") and anchor not in anchors(target)
        ):
            broken.append(f"{link}#{anchor}")
    assert broken == []
