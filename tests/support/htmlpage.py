"""Parser of a report's page: its elements, and its text by section."""

import re
from html.parser import HTMLParser

VOID = {"meta", "wbr", "br"}


class Page(HTMLParser):
    """The elements of a page with their attributes, in order, and its text with one space between words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.elements, self.open = html, list[tuple[str, dict[str, str]]](), list[str]()
        self._texts, self._section = {"": ""}, ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "h2":
            self._section = self.elements[-1][1]["id"]
            self._texts[self._section] = ""
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"path", "use"}:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self._texts[self._section] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts.values()).split())

    def section(self, id_: str) -> str:
        return " ".join(self._texts[id_].split())

    def elements_of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def plain(setting: str) -> str:
    """Return a setting as the text of the page shows it: with a subscript in place of an underscore."""
    return setting.replace("b_", "b")


def described(page: Page, title: str) -> str:
    """Return the description of the image with a title."""
    match = re.search(rf">{re.escape(title)}</title><desc id=\"[^\"]+\">(.*?)</desc>", page.html)
    assert match, title
    return match[1]
