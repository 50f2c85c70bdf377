"""The report in a headless Chromium: no message on its console, no request, nothing that axe-core finds.

Needs Chromium and the extra ``browser``; ``make browser`` fails where they are missing. ``BROWSER_RECORD`` is a JSON
file for what was checked, ``BROWSER_PICTURES`` a folder for pictures of the pages.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import tutti
from tests.report.test_html_report import write_run

RECORD, PICTURES = os.environ.get("BROWSER_RECORD"), os.environ.get("BROWSER_PICTURES")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS, SCHEMES = (375, 768, 1280), ("light", "dark")
TRAIN = (
    "train",
    "digits",
    "--batch-size=128",
    "--optimizer=adam:lr=0.003",
    "--epochs=2",
    "--eval-every=5st",
    "--micro-batch=32",
    "--noise-every=1",
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None and not RECORD, reason="there is no Chromium"),
]


@dataclass
class Checked:
    """The browser with axe-core, and what was found on each page that it has shown."""

    browser: Any
    axe: Any
    axe_core: str = ""
    pages: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def checked() -> Iterator[Checked]:
    if not RECORD:
        pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
        pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        found = Checked(browser, Axe())
        yield found
        versions = {name: version(name) for name in ("playwright", "axe-playwright-python")}
        versions |= {"chromium": browser.version, "axe-core": found.axe_core}
        browser.close()
    if RECORD:
        record = {"date": datetime.date.today().isoformat(), "versions": versions, "pages": found.pages}
        Path(RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports on a run of one device, and on it and a traced one of two devices, with every section that they fill."""
    folder = tmp_path_factory.mktemp("browser")
    small = ("--samples=64", "--probes=2", "--lanczos=8", "--points=11", "--grid=7", "--eigenvalues=2")
    for words in (
        (*TRAIN, "--until=accuracy=0.4", "--out=one"),
        (*TRAIN, "--devices=2", "--trace", "--out=two"),
        ("landscape", "one", "--to=two", *small),
        ("report", "one"),
        ("report", "one", "two", "--out=several.html"),
    ):
        done = tutti(folder, *words)
        assert done.code == 0, done.err
    return {"one": folder / "one" / "report.html", "several": folder / "several.html"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "several"])
def test_a_page_for_all(checked: Checked, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    path = pages[name]
    page = checked.browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert not said and [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    for folded in page.locator("summary").all():
        folded.click()
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    ends = "all => Math.max(...all.map(each => each.getBoundingClientRect().right))"
    assert page.locator("caption").evaluate_all(ends) <= width
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{PICTURES}/{name}-{width}-{scheme}.png", full_page=True)
    found = checked.axe.run(page)
    checked.axe_core = found.response["testEngine"]["version"]
    counts = {kind: len(found.response[kind]) for kind in ("passes", "violations", "incomplete", "inapplicable")}
    undecided = sorted(rule["id"] for rule in found.response["incomplete"])
    shown = {"page": name, "width": width, "scheme": scheme, "console": len(said), "requests": len(asked)}
    checked.pages.append({**shown, "rules": counts, "undecided": undecided})
    page.close()
    assert found.violations_count == 0, found.generate_report()


def test_a_table_is_sorted_by_the_keyboard(checked: Checked, tmp_path: Path) -> None:
    from tutti.report.html_report import write_report

    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", devices=2, step=0.3)]
    page = checked.browser.new_page()
    page.goto(write_report(runs, None, tmp_path / "page.html").as_uri())
    head = page.locator("th button", has_text="samples/s").first
    head.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    table = page.locator("table", has=head)
    assert table.locator("tbody tr").first.locator("th").inner_text().startswith("B")
    assert table.locator("[aria-sort]").get_attribute("aria-sort") == "descending"
    page.close()
