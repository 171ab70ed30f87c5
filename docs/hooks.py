"""Pages of the site that lie outside docs/, and links between all of them.

Pages are read in the site, and as files of the sources. So their links are those of files, relative
to the one that they stand in, and become those of the site here. A link to a file that is no page
keeps its text alone.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Files of the sources, and the pages that they are.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "results.md",
    "kernels/README.md": "sources.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.cutlass_attn")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    here = page.file.src_uri
    source = _SOURCES.get(here, f"docs/{here}")

    def of_the_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if ":" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in PAGES:
            path = PAGES[path]
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        else:
            if not (ROOT / path).exists():
                _log.warning("%s links to %s, which does not exist", source, target)
            return text.strip("![]")
        return f"{text}({posixpath.relpath(path, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(of_the_site, markdown)
