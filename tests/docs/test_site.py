"""The built documentation, as its files and as a reader sees it in a browser.

These tests need a site built from the current sources, and most need Chromium and
`playwright`. CONTRIBUTING.md says how to build the site; `.ci/run` does so.
"""

import re
import tomllib
from urllib.parse import unquote

import pytest

from helpers.files import project_files
from helpers.site import ROOT, SITE, find_chromium, new_page, open_browser, serve

SOURCES = project_files(
    *("docs/**", "notebooks/*.ipynb", "optax_lossscale/**/*.py"),
    *("benchmarks/**/*.md", "benchmarks/**/*.png", "CHANGELOG.md"),
)
PHONE = {"width": 390, "height": 844}


def reason_to_skip():
    """Why there is no site to test, or `None`."""
    inventory = SITE / "objects.inv"  # Every build writes it last.
    if not inventory.exists():
        return "docs/_build/html was not built"
    newest = max(SOURCES, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > inventory.stat().st_mtime:
        return f"docs/_build/html is older than {newest}"
    return None


REASON = reason_to_skip()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
PAGES = [page for page in PAGES if not page.startswith("_static/")]


def test_every_file_that_a_page_shows_or_links_to_is_there():
    for page in PAGES:
        text = (SITE / page).read_text()
        for link in re.findall(r'(?:href|src)="([^":#?]+)["#?]', text):
            assert (SITE / page).parent.joinpath(unquote(link)).exists(), (page, link)


def test_every_link_to_the_repository_leads_to_a_file_or_folder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    start = re.escape(project["urls"]["Repository"])
    link = re.compile(rf'href="{start}/(?:blob|edit|raw|tree)/main/([^"#?]+)')
    linked = {
        path for page in PAGES for path in link.findall((SITE / page).read_text())
    }
    assert len(linked) > 30
    assert [path for path in linked if not (ROOT / unquote(path)).exists()] == []


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


def search(page, words):
    """Searches from the first page, and returns what is found."""
    page.goto("index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type(words)
    page.keyboard.press("Enter")
    return page.locator("#search-results")


@pytest.mark.parametrize("words", ["loss is NaN", "loss NaN"])
def test_search_for_a_nan_finds_troubleshooting_first(browser, address, words):
    results = search(new_page(browser, address), words)
    first = results.locator("li a").first
    assert "troubleshooting.html" in first.get_attribute("href", timeout=10_000)


def test_search_finds_the_entry_of_loss_scaled(browser, address):
    page = new_page(browser, address)
    results = search(page, "loss_scaled")
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
