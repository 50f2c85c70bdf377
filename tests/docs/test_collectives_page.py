"""The example of docs/collectives.md runs and says what the page says; its algorithms are those that there are."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

from tutti.config.sync_config import AllReduceConfig

TEXT = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    links, traffic, times = said.getvalue().splitlines()
    assert links == "[(0, 2), (1, 3), (2, 0), (3, 1)]"
    assert traffic == "LinkTraffic(messages=2, bytes=2000000)"
    ring, hierarchical = map(float, times.split())
    assert hierarchical < ring


def test_the_table_has_every_algorithm() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.M))
    assert listed == set(get_args(get_type_hints(AllReduceConfig)["algorithm"]))


def test_the_table_of_options_has_all_others() -> None:
    listed = set(re.findall(r"`(\w+)=\w+`(?=[^|]*\|)", TEXT.split("| option |")[1].split("\n\n")[0]))
    assert listed == {field.name for field in fields(AllReduceConfig)} - {"algorithm"}
