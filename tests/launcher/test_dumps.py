"""Reading what faulthandler wrote."""

from __future__ import annotations

from tutti.launcher.dumps import lines_of, place_of

STACKS = """Thread 0x00007f23d4bff6c0 (most recent call first):
  File "{library}/threading.py", line 324 in wait
  File "{site}/torch/data.py", line 5 in fetch
  File "own.py", line 12 in save
  File "{library}/threading.py", line 1002 in _bootstrap

Current thread 0x00007f23dd1c7b80 (most recent call first):
  File "{library}/site-packages/torch/nn/linear.py", line 3 in forward
  File "own.py", line 18 in loss
  File "run.py", line 1 in <module>
"""


def stacks() -> str:
    import os
    from pathlib import Path

    library = Path(os.__file__).parent
    return STACKS.format(library=library, site=library / "site-packages")


def test_the_thread_is_found_and_its_own_line() -> None:
    saving = lines_of(stacks(), 0x7F23D4BFF6C0)
    assert len(saving) == 4 and place_of(saving) == "save (own.py, line 12)"
    training = lines_of(stacks(), 0x7F23DD1C7B80)
    assert len(training) == 3 and place_of(training) == "loss (own.py, line 18)"


def test_without_the_thread_it_is_the_main_one() -> None:
    assert lines_of(stacks(), 1) == lines_of(stacks(), 0x7F23DD1C7B80)


def test_nothing_was_written() -> None:
    assert lines_of("", 1) == [] and place_of([]) is None


def test_where_there_is_no_line_of_the_users_own_it_is_the_innermost() -> None:
    assert place_of(['  File "<frozen runpy>", line 1 in _run_code']) == "_run_code (<frozen runpy>, line 1)"
    assert (
        place_of(['  File "/usr/lib/python3/threading.py", line 1 in wait', "  ..."]) == "wait (threading.py, line 1)"
    )
