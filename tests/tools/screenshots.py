"""Takes screenshots of six pages of the built documentation, light and dark.

python tests/tools/screenshots.py FOLDER
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers.site import SITE, new_page, open_browser, serve

PAGES = (
    "index",
    "quick_start",
    "guides/autocast",
    "notebooks/05_choosing_a_rule",
    "reference/training_step",
    "benchmarks",
)


def main(folder):
    """Writes `PAGE_light.png` and `PAGE_dark.png` for each page."""
    folder.mkdir(parents=True, exist_ok=True)
    with serve(SITE) as address, open_browser() as browser:
        for scheme in ("light", "dark"):
            page = new_page(browser, address, color_scheme=scheme)
            for name in PAGES:
                page.goto(f"{name}.html")
                page.screenshot(path=folder / f"{name.replace('/', '_')}_{scheme}.png")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
