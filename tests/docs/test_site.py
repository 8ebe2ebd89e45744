"""The built documentation, as its files and as a reader sees it in a browser.

These tests need a site built from the current sources, and most need Chromium and
`playwright`. CONTRIBUTING.md says how to build the site; `.ci/run` does so.
"""

import functools
import html.parser
import pathlib
import posixpath
import re
import tomllib
import urllib.parse

import pytest

from helpers.files import project_files
from helpers.site import ROOT, SITE, find_chromium, new_page, open_browser, serve

URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
SOURCES = {
    path.relative_to(ROOT).as_posix()
    for path in project_files(
        "docs/**/*.md",
        "docs/*.py",
        "docs/_*/*.*",
        "docs/inventories/*",
        "notebooks/*.ipynb",
        "optax_lossscale/**/*.py",
        "benchmarks/README.md",
        "benchmarks/*.png",
        "CHANGELOG.md",
    )
}
PHONE = {"width": 390, "height": 844}


def reason_to_skip():
    """Why there is no site to test, or `None`."""
    inventory = SITE / "objects.inv"  # Every build writes it last.
    if not inventory.exists():
        return "docs/_build/html was not built"
    newest = max(SOURCES, key=lambda path: (ROOT / path).stat().st_mtime)
    if (ROOT / newest).stat().st_mtime > inventory.stat().st_mtime:
        return f"docs/_build/html is older than {newest}"
    return None


REASON = reason_to_skip()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class PageParser(html.parser.HTMLParser):
    """Collects the links of a page, and the ids to which links can point."""

    def __init__(self, text):
        super().__init__()
        self.links, self.ids = set(), {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[name] for name in ("id", "name") if attrs.get(name)}
        self.links |= {attrs[name] for name in ("href", "src") if attrs.get(name)}


@functools.cache
def parse(path):
    return PageParser((SITE / path).read_text())


PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
PAGES = [page for page in PAGES if not page.startswith("_static/")]


def is_broken(page, link):
    """Whether a link to this site or to a file of the repository leads nowhere."""
    for kind in ("blob", "edit", "raw", "tree"):
        start = f"{URLS['Repository']}/{kind}/main/"
        if link.startswith(start):
            path = urllib.parse.urlsplit(link.removeprefix(start)).path
            return not (ROOT / path).exists()
    here = urllib.parse.urljoin(URLS["Documentation"], page)
    absolute = urllib.parse.urljoin(here, link)
    if not absolute.startswith(URLS["Documentation"]):
        return urllib.parse.urlsplit(link).scheme == ""
    parts = urllib.parse.urlsplit(absolute.removeprefix(URLS["Documentation"]))
    target = urllib.parse.unquote(parts.path)
    if not target or target.endswith("/"):
        target = posixpath.join(target, "index.html")
    if not (SITE / target).is_file():
        return True
    fragment = urllib.parse.unquote(parts.fragment)
    return target.endswith(".html") and fragment not in parse(target).ids


def test_the_site_has_a_page_for_every_source_and_no_other():
    docs = {path.removeprefix("docs/") for path in SOURCES if path.endswith(".md")}
    docs -= {"benchmarks/README.md", "CHANGELOG.md"}  # Included by others.
    sources = docs | {path for path in SOURCES if path.endswith(".ipynb")}
    written = {
        str(pathlib.PurePosixPath(path).with_suffix(".html")) for path in sources
    }
    made_by_sphinx = {"genindex.html", "py-modindex.html", "search.html"}
    assert set(PAGES) - made_by_sphinx == written


def test_every_link_to_the_site_or_the_repository_leads_somewhere():
    broken = {(page, link) for page in PAGES for link in parse(page).links}
    broken = {(page, link) for page, link in broken if is_broken(page, link)}
    assert broken == set()


def test_no_page_shows_a_power_as_bold_text():
    # Markdown turns the unquoted `2**3 to 2**4` into 2, bold text, and 4.
    for page in PAGES:
        assert not re.search(r"\d<strong>", (SITE / page).read_text()), page


def test_a_link_that_leads_nowhere_is_found():
    index = parse("index.html")
    assert not is_broken("index.html", "search.html")
    assert not is_broken("index.html", f"#{max(index.ids)}")
    assert not is_broken("index.html", f"{URLS['Documentation']}search.html")
    assert is_broken("index.html", "nowhere.html")
    assert is_broken("index.html", "#nowhere")
    assert is_broken("index.html", f"{URLS['Repository']}/blob/main/nowhere.py")
    assert is_broken("index.html", f"{URLS['Documentation']}nowhere.html")


@pytest.fixture(scope="module")
def address():
    with serve(SITE) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="playwright is not installed")
    if find_chromium() is None:
        pytest.skip("there is no Chromium")
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def visits(browser, address):
    """What went wrong on each page, and its width on a phone in pixels."""
    page = new_page(browser, address)
    problems, widths = [], {}

    def note(what):
        problems.append((page.url.removeprefix(address), what))

    page.on("console", lambda log: note(log.text) if log.type == "error" else None)
    page.on("pageerror", lambda error: note(str(error)))
    page.on("requestfailed", lambda request: note(request.url))
    for path in PAGES:
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(path)
        page.set_viewport_size(PHONE)
        widths[path] = page.evaluate("document.documentElement.scrollWidth")
    return problems, widths


def test_pages_load_without_an_error_or_a_request_to_another_host(visits):
    problems, _ = visits
    assert problems == []


def test_no_page_is_wider_than_a_phone(visits):
    _, widths = visits
    assert {page: w for page, w in widths.items() if w > PHONE["width"]} == {}


def test_search_finds_the_entry_of_loss_scaled(browser, address):
    page = new_page(browser, address)
    page.goto("index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("loss_scaled")
    page.keyboard.press("Enter")
    results = page.locator("#search-results")
    entry = results.locator("a[href$='#optax_lossscale.loss_scaled']").first
    entry.click(timeout=10_000)
    page.wait_for_url("**/reference/*#optax_lossscale.loss_scaled")


def test_on_a_phone_the_sidebar_opens_and_leads_to_another_page(browser, address):
    page = new_page(browser, address, viewport=PHONE)
    page.goto("index.html")
    assert not page.get_by_role("dialog").is_visible()
    page.locator(".primary-toggle:visible").click(timeout=10_000)
    page.get_by_role("dialog").get_by_role("link", name="Quick start").click(
        timeout=10_000
    )
    page.wait_for_url("**/quick_start.html")


BRIGHTNESS = """name => {
  const color = getComputedStyle(document.body)[name];
  const [red, green, blue] = color.match(/[0-9.]+/g).map(Number);
  return (red + green + blue) / 3 / 255;
}"""


def is_dark(page):
    background = page.evaluate(BRIGHTNESS, "backgroundColor")
    return background < 0.2 and page.evaluate(BRIGHTNESS, "color") > 0.7


def test_dark_mode_is_the_systems_or_chosen_and_is_kept_on_the_next_page(
    browser, address
):
    page = new_page(browser, address, color_scheme="dark")
    page.goto("index.html")
    assert is_dark(page)
    page = new_page(browser, address, color_scheme="light")
    page.goto("index.html")
    assert not is_dark(page)
    page.get_by_role("button", name="Color mode").click(timeout=10_000)
    page.get_by_role("button", name="Dark").click(timeout=10_000)
    assert is_dark(page)
    page.goto("quick_start.html")
    assert is_dark(page)
