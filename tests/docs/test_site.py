"""The built documentation: its links, and how it looks and searches in a browser.

CONTRIBUTING.md says how to build it; `.ci/run` does so. The browser is Chromium, and
needs `playwright`.
"""

import functools
import http.server
import re
import shutil
import threading
import tomllib
from urllib.parse import unquote

import pytest

from helpers.files import ROOT

SITE = ROOT / "docs/_build/html"
# Every build writes the inventory last.
IS_BUILT = (SITE / "objects.inv").exists()
PAGES = [page for page in SITE.rglob("*.html") if SITE / "_static" not in page.parents]
PHONE = {"width": 390, "height": 844}
pytestmark = pytest.mark.skipif(not IS_BUILT, reason="docs/_build/html was not built")


def test_every_file_that_a_page_shows_or_links_to_is_there():
    for page in PAGES:
        for link in re.findall(r'(?:href|src)="([^":#?]+)["#?]', page.read_text()):
            assert (page.parent / unquote(link)).exists(), (page, link)


def test_every_link_to_the_repository_leads_to_a_file_or_folder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    start = re.escape(project["urls"]["Repository"])
    link = re.compile(rf'href="{start}/(?:blob|edit|raw|tree)/main/([^"#?]+)')
    linked = {path for page in PAGES for path in link.findall(page.read_text())}
    assert linked
    assert [path for path in linked if not (ROOT / unquote(path)).exists()] == []


@pytest.fixture(scope="module")
def browser_page():
    """A page of a browser that reaches nothing but the site."""
    names = "chromium", "chromium-browser", "google-chrome"
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("there is no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server, playwright.sync_playwright() as started:
        # Root, as in CI, has no sandbox.
        browser = started.chromium.launch(
            executable_path=chromium, chromium_sandbox=False
        )
        address = f"http://127.0.0.1:{server.server_port}/"
        page = browser.new_page(base_url=address, viewport=PHONE)
        page.route(re.compile(rf"^(?!{address})http"), lambda route: route.abort())
        yield page
        browser.close()
        server.shutdown()


def test_pages_fit_a_phone_and_the_sidebar_has_few_links(browser_page):
    problems = []
    browser_page.on("pageerror", lambda error: problems.append(str(error)))
    browser_page.on("requestfailed", lambda request: problems.append(request.url))
    for path in PAGES:
        browser_page.goto(path.relative_to(SITE).as_posix())
        root = "document.documentElement"
        assert browser_page.evaluate(f"{root}.scrollWidth") <= PHONE["width"], path
        assert browser_page.evaluate(f"{root}.scrollHeight") <= 9000, path
    assert browser_page.locator("nav.bd-links a").count() <= 45
    assert problems == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("my loss is NaN", "troubleshooting.html"),
        ("every step is skipped", "troubleshooting.html"),
        ("UnexpectedTracerError", "troubleshooting.html"),
        (
            "how do I use it with gradient accumulation",
            "guides/accumulation_and_clipping.html",
        ),
        ("clip gradients", "guides/accumulation_and_clipping.html"),
        ("batch norm", "guides/batch_statistics_and_dropout.html"),
        ("which rule", "guides/choosing_a_rule.html"),
        ("resume a checkpoint", "guides/checkpoints.html"),
        ("multi GPU", "guides/many_devices.html"),
        ("V100", "install.html"),
        ("Tunix", "trainers.html"),
        ("MaxText", "trainers.html"),
        ("GradScaler", "migration/pytorch.html"),
        ("what does it cost", "benchmarks.html"),
        ("do I need this", "do_i_need_this.html"),
        ("loss_scaled", "optax_lossscale.loss_scaled.html"),
    ],
)
def test_search_finds_first_what_is_meant(browser_page, words, found):
    browser_page.goto(f"search.html?q={words}")
    first = browser_page.locator("#search-results li a").first
    assert found in first.get_attribute("href", timeout=10_000)
