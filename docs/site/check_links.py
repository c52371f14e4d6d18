"""Checks a built site: links and anchors within it exist, and nothing is loaded from a network."""

import pathlib
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

#: Elements and attributes that load something when a page is shown.
LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "srcset")}


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str | None] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the attributes of an element."""
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src", "srcset") and value and not value.startswith("data:"):
                (self.loaded if (tag, name) in LOADED else self.links).append(value)


def problems(root: pathlib.Path) -> list[str]:
    """One line per link without a target and per file from a network."""
    pages = {path: Page(path) for path in root.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.loaded:
                    found.append(f"{path}: loads {link}")
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.is_file():
                found.append(f"{path}: no file for {link}")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                found.append(f"{path}: no anchor for {link}")
    return found


if __name__ == "__main__":
    found = problems(pathlib.Path(sys.argv[1]).resolve())
    sys.exit("\n".join(found) if found else None)
