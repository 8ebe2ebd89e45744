"""The built documentation, served on this machine and opened in headless Chromium."""

import contextlib
import functools
import http.server
import re
import shutil
import threading

from helpers.files import ROOT

SITE = ROOT / "docs/_build/html"
OTHER_HOSTS = re.compile(r"^https?://(?!127\.0\.0\.1:)")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line of log for each."""

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def serve(folder):
    """Serves a folder on a free port while the block runs; yields the address."""
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def find_chromium():
    """The path of an installed Chromium or Chrome, or `None`."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def open_browser():
    """Starts headless Chromium while the block runs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium())
        try:
            yield chromium
        finally:
            chromium.close()


def new_page(browser, address, **options):
    """A page with a profile of its own, which reaches nothing but the served site."""
    context = browser.new_context(base_url=address, **options)
    context.route(OTHER_HOSTS, lambda route: route.abort())
    return context.new_page()
