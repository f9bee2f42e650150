"""Takes a picture of the top of a report for the README: python tools/picture.py REPORT.html PICTURE.png"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 900


def photograph(report: Path, picture: Path) -> None:
    """Open `report` in headless Chromium, offline, and save a picture of its top."""
    browser_path = shutil.which("chromium")
    if browser_path is None:
        sys.exit("chromium is needed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.context.set_offline(True)
        page.goto(report.resolve().as_uri())
        page.wait_for_selector(".main-svg")
        picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    photograph(Path(sys.argv[1]), Path(sys.argv[2]))
