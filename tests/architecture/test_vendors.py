"""Names of accelerators' vendors stand in ``device.py`` and ``torch_compat.py`` alone; all other code asks them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import SOURCE, trees

# Horovod's interface asks for vendors by name.
EXEMPT = {SOURCE / "device.py", SOURCE / "torch_compat.py", SOURCE / "horovod" / "torch" / "job.py"}
PATHS = sorted(set(SOURCE.rglob("*.py")) - EXEMPT)

ANYWHERE, ALONE = ("cuda", "nccl", "rocm", "rccl"), ("hip", "xpu", "mps", "hpu")
VENDOR = re.compile(rf"{'|'.join(ANYWHERE)}|(?<![a-z])(?:{'|'.join(ALONE)})(?![a-z])")

ALLOWED = {
    *("nccl_built", "cuda_built", "rocm_built"),  # names of Horovod's interface
    "--num-nccl-streams",  # a flag of horovodrun
    "max-autotune-no-cudagraphs",  # a mode of torch.compile, as the user types it
}


def vendor_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each identifier or text with a vendor's name; docstrings are prose and left alone."""
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found = [node.value]
        elif isinstance(node, ast.Name):
            found = [node.id]
        elif isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.arg | ast.keyword):
            found = [node.arg or ""]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        for text in found:
            if VENDOR.search(text.lower() if len(text.split()) == 1 else text) and text not in ALLOWED:
                yield node.lineno, text  # type: ignore[attr-defined]


def test_no_vendor_is_named_elsewhere() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} {text}"
        for path, tree in trees(PATHS, *ANYWHERE, *ALONE)
        for line, text in vendor_names(tree)
    ]
    assert not found, "ask tutti.device"


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "tensor.is_cuda",
        "device.type == 'cuda'",
        "backend = 'cpu:gloo,cuda:nccl'",
        "def check(cuda: bool): ...",
        "check(cuda=True)",
        "from torch import xpu",
        "import torch.cuda",
        "torch.version.hip",
        "torch.backends.mps",
    ],
)
def test_a_vendor_is_noticed(code: str) -> None:
    assert list(vendor_names(ast.parse(code)))


@pytest.mark.parametrize("code", ["ship = 1", "tensor.is_cpu", "'''--device cuda'''", "tmps = chip"])
def test_other_names_are_no_vendors(code: str) -> None:
    assert not list(vendor_names(ast.parse(code)))
