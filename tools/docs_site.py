"""Hook of mkdocs (``mkdocs.yml``): the pages outside ``docs/``, and links that work on the site and in the
repository.

Pages link by their places in the repository. On the site, links to other pages are rewritten, and file names
as their texts become titles; of links to source files, which the site does not have, the text stays.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "examples/README.md": "examples.md",
    "slurm/README.md": "slurm.md",
}
"""Path in the repository -> path on the site; those of ``docs/`` follow from their names."""
_SOURCES = {uri: path for path, uri in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s:]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside ``docs/``."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page, but not what looks like one in a code block."""
    path = _SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    titles = {
        uri: title
        for section in config.nav
        for entry in next(iter(section.values()))
        for title, uri in entry.items()
    }

    def rewrite(found: re.Match[str]) -> str:
        mark, text, link, anchor = found.groups(default="")
        if not link:
            return found.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if not (ROOT / target).exists():
            raise ValueError(f"{path}: there is no {target}")
        uri = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not uri:
            return text
        if text.endswith(".md"):
            text = titles.get(uri, text)
        place = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({place}{anchor})"

    parts, end = [], 0
    for block in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewrite, markdown[end : block.start()]), block.group()]
        end = block.end()
    return "".join([*parts, _LINK.sub(rewrite, markdown[end:])])


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    r"""Show ``\|`` in the code of a table's cell as code hosting sites do: as ``|``."""
    return re.sub(r"<td.*?</td>", lambda cell: cell.group().replace(r"\|", "|"), html, flags=re.DOTALL)
