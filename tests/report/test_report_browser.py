"""A report in a real browser: it loads nothing else, fits, is legible, has names for its parts, and prints."""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from htmlpage import Page as HtmlPage
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs Chromium, as `chromium` on PATH")
PAPER = 688  # CSS pixels between the margins of A4, 184 mm
OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true })"

# Text that overflows its own box or the box around it, except in boxes that scroll.
OVERFLOWING = """() => {
  const wide = document.documentElement.clientWidth + 0.5, found = [];
  for (const each of document.querySelectorAll('body *')) {
    const box = each.getBoundingClientRect(), style = getComputedStyle(each);
    const scroller = each.closest('.table');
    const scrolls = scroller && scroller !== each && getComputedStyle(scroller).overflowX === 'auto';
    const name = each.tagName + ': ' + each.textContent.slice(0, 40);
    if (box.width && !scrolls && (box.right > wide || box.left < -0.5)) found.push(name);
    const isBlock = !(each instanceof SVGElement) && !['inline', 'none'].includes(style.display);
    if (isBlock && style.overflowX === 'visible' && each.scrollWidth > each.clientWidth + 1 && each.clientWidth)
      found.push('text of ' + name);
  }
  for (const text of document.querySelectorAll('svg text')) {
    const box = text.getBoundingClientRect(), whole = text.closest('svg').getBoundingClientRect();
    if (box.width && (box.left < whole.left - 2 || box.right > whole.right + 2 || box.bottom > whole.bottom + 2))
      found.push('label ' + text.textContent);
  }
  return found;
}"""

# Contrast (WCAG 2.2, 1.4.3) of every text with the color behind it; [ratio, text], the lowest ratio first.
CONTRASTS = """() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = channels(colour).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = each => {
    const box = each.getBoundingClientRect(), cells = [...(each.closest('svg')?.querySelectorAll('path') ?? [])];
    const cell = cells.find(path => {
      const area = path.getBoundingClientRect(), fill = getComputedStyle(path).fill, centre = box.left + box.width / 2;
      return fill != 'none' && area.width > 10 && area.left < centre && area.right > centre
        && area.top < box.top + box.height / 2 && area.bottom > box.top + box.height / 2
        && getComputedStyle(path).fillOpacity == 1;
    });
    if (cell) return getComputedStyle(cell).fill;
    for (let at = each; at; at = at.parentElement) {
      const paint = getComputedStyle(at).backgroundColor;
      if ((channels(paint)[3] ?? 1) > 0) return paint;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const each = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || ['STYLE', 'title', 'desc'].includes(each.tagName)) continue;
    const style = getComputedStyle(each);
    const [a, b] = [light(each instanceof SVGElement ? style.fill : style.color), light(behind(each))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), each.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""

# Sizes of the labels of figures on the screen, in CSS pixels.
LABELS = """() => {
  const shown = [...document.querySelectorAll('svg text')].filter(each => each.getBoundingClientRect().width);
  return shown.map(each => {
    const whole = each.closest('svg'), scale = whole.getBoundingClientRect().width / whole.viewBox.baseVal.width;
    return parseFloat(getComputedStyle(each).fontSize) * scale;
  });
}"""


@pytest.fixture(scope="module")
def file(page: HtmlPage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page.html, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(browser: Browser, file: Path) -> Any:
    """Return a function that opens the report in a window of some width, once for all tests; parts may be unfolded."""

    @cache
    def open_(width: int, scheme: Literal["dark", "light"] = "light", has_scripts: bool = True) -> Page:
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=has_scripts
        )
        page.goto(file.as_uri())
        return page

    return open_


def test_nothing_else_is_requested_and_nothing_is_logged(browser: Browser, file: Path) -> None:
    page = browser.new_page()
    requested, said = [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri(), wait_until="networkidle")
    page.close()
    assert requested == [file.as_uri()]
    assert said == []


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_everything_fits_the_window(open_page: Any, width: int) -> None:
    page = open_page(width)
    page.evaluate(OPEN)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOWING) == []


def test_labels_are_legible_on_a_phone(open_page: Any) -> None:
    page = open_page(390)
    page.evaluate(OPEN)
    sizes = page.evaluate(LABELS)
    assert len(sizes) > 100
    assert min(sizes) > 10.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough(open_page: Any, scheme: Literal["dark", "light"]) -> None:
    page = open_page(1280, scheme)
    page.evaluate(OPEN)
    found = page.evaluate(CONTRASTS)
    assert len(found) > 300
    assert found[0][0] >= 4.5, found[:5]


def test_every_figure_table_and_part_has_a_name(open_page: Any) -> None:
    page = open_page(1280)
    page.evaluate(OPEN)
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    names: dict[str, list[str]] = {}
    for node in tree:
        if not node["ignored"]:
            names.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert len(names["image"]) == page.locator("svg[role=img]").count() > 20
    described = [node for node in tree if not node["ignored"] and node["role"]["value"] == "image"]
    assert all(node.get("description", {}).get("value") for node in described)
    for role in ("image", "table", "heading", "columnheader", "rowheader", "link", "navigation"):
        assert names[role]
        assert all(names[role]), role
    for role in ("main", "banner", "contentinfo"):
        assert len(names[role]) == 1


def test_the_page_is_complete_without_scripts(open_page: Any) -> None:
    page = open_page(1280, has_scripts=False)
    page.get_by_text("Run by run: 10 runs").click()
    assert page.get_by_role("rowheader", name="fedavg-non-iid-1").first.is_visible()


def test_print_opens_folded_parts_and_cuts_nothing(open_page: Any) -> None:
    page = open_page(PAPER)
    hidden = "[...document.querySelectorAll('details:not([open]) td, details:not([open]) svg')]"
    visible = f"{hidden}.filter(each => each.checkVisibility() && each.getBoundingClientRect().height).length"
    assert page.evaluate(f"{hidden}.length") > 50
    assert page.evaluate(visible) == 0
    page.emulate_media(media="print")
    assert page.evaluate(visible) == page.evaluate(f"{hidden}.length")
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate("getComputedStyle(document.querySelector('.panel')).breakInside") == "avoid"
    heights = page.evaluate("[...document.querySelectorAll('.panel')].map(each => each.getBoundingClientRect().height)")
    assert max(heights) < 900  # a page is 1000 high, and a taller panel would be cut
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
