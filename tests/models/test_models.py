"""Models of other libraries under every strategy equal plain PyTorch, or are refused for a reason under review."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.models import harness, page, zoo
from tests.models.harness import Case

PART, RECORD = os.environ.get("MODELS_PART"), os.environ.get("MODELS_RECORD")
SMOKE = Case("Llama", "padded", "mirrored", 2)


def check(case: Case) -> None:
    package = zoo.MODELS[case.model].package
    if not zoo.MODELS[case.model].installed:
        pytest.skip(f"{package} is not installed")
    verdict = harness.check(case)
    if RECORD:
        line = {"model": case.model, "form": case.form, "strategy": case.strategy, "devices": case.devices}
        with Path(RECORD).open("a", encoding="utf-8") as file:
            # Where the packages are installed is no part of a result.
            text = re.sub(r"[^\s(\"]*/site-packages/", "", verdict.text)
            known = {"kind": verdict.kind, "text": text, "version": f"{package} {version(package)}"}
            file.write(json.dumps(line | known) + "\n")
    assert verdict.kind != "wrong", verdict.text
    if verdict.kind == "refused":
        assert harness.refusal(case) is not None, f"a new refusal: {verdict.text}"
    else:
        assert harness.refusal(case) is None, f"works, but is listed as refused: {harness.refusal(case)}"


def test_a_padded_batch_of_a_language_model() -> None:
    check(SMOKE)


def test_the_page_shows_the_records() -> None:
    """Write it again with ``make models``."""
    assert page.table(page.records()) == page.PAGE.read_text(encoding="utf-8")


@pytest.mark.models
@pytest.mark.parametrize("case", harness.part(PART) if PART else [], ids=str)
def test_equal_or_refused(case: Case) -> None:
    check(case)
