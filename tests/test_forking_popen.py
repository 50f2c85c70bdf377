"""A Python that a forked command starts is as a new one, and has the modules of the command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.forkserver import run
from tests.launching import SAFETY_NET, SOURCE

STARTS = """
import json, os, signal, subprocess, sys
sys.path.insert(0, "of the parent")
signal.signal(signal.SIGTERM, lambda *_: None)
print("once")
words = ["env", "OWN=1", sys.executable, "-P", os.path.abspath("started.py")]
done = subprocess.run([*words, "tell"], cwd="there", input="said", capture_output=True, text=True)
killed = subprocess.Popen([*words, "wait"], stdout=subprocess.PIPE, start_new_session=True)
killed.stdout.readline()
killed.terminate()
codes = [killed.wait()]
for how in ("raise", "interrupt"):
    codes.append(subprocess.run([*words, how], stderr=subprocess.DEVNULL).returncode)
print(json.dumps([done.returncode, json.loads(done.stdout), done.stderr, codes]))
"""
STARTED = """
import atexit, json, os, sys, time
how = sys.argv[1]
if how == "tell":
    atexit.register(print, "at the end", file=sys.stderr)
    files = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]
    told = {"folder": os.path.basename(os.getcwd()), "own": os.environ["OWN"], "input": sys.stdin.read()}
    told |= {"session": os.getsid(0) == os.getpid(), "path": "of the parent" in sys.path, "files": len(files) - 1}
    print(json.dumps(told | {"torch": "torch" in sys.modules}))
    sys.exit(7)
if how == "wait":
    print(os.getsid(0) == os.getpid(), flush=True)
    time.sleep(60)
raise KeyboardInterrupt if how == "interrupt" else ValueError
"""


@pytest.mark.parametrize("forks", [True, False])
def test_a_forked_python_is_as_a_started_one(forks: bool, tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    (tmp_path / "started.py").write_text(STARTED)
    (tmp_path / "there").mkdir()
    environ = os.environ | {"PYTHONPATH": str(SOURCE)} | ({} if forks else {"TESTS_EXEC": "1"})
    done = run(["starts.py"], tmp_path, environ, SAFETY_NET)
    assert done.returncode == 0, done.stderr
    once, answer = done.stdout.splitlines()
    told = {"folder": "there", "own": "1", "input": "said", "session": False, "path": False, "files": 0}
    assert once == "once"
    assert json.loads(answer) == [7, told | {"torch": forks}, "at the end\n", [-15, 1, -2]]
