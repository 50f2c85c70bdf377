"""The report in a headless Chromium: no message on its console, no request, nothing that axe-core finds.

Needs Chromium, and the packages ``playwright`` and ``axe-playwright-python``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.report.test_html_report import write_run

pytestmark = pytest.mark.full

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize(("width", "scheme"), [(375, "light"), (768, "dark"), (1280, "light"), (1280, "dark")])
def test_a_page_for_all(tmp_path: Path, width: int, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    from tutti.report.html_report import write_report

    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", devices=2, step=0.3)]
    path = write_report(runs, None, tmp_path / "page.html")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        assert not said and [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        head = page.locator("th button", has_text="samples/s").first
        head.focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        table = page.locator("table", has=head)
        assert table.locator("tbody tr").first.locator("th").inner_text().startswith("B")
        assert table.locator("[aria-sort]").get_attribute("aria-sort") == "descending"
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        browser.close()
