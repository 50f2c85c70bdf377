"""What a traced forward changes in a module's attributes is found, and undone in the very object."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tutti.nn.untraced import Constants, Untraced, hook_tables


class Names(list[str]):
    """A list of a script's own class."""


def replaced(module: Any) -> None:
    module.kept = type(module.kept)()


def moved(module: Any) -> None:
    module.kept.move_to_end("a")


def exchanged(module: Any) -> None:
    module.kept.remove(1)
    module.kept.add(3)


MADE: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "list": (lambda: ["a"], lambda m: m.kept.append("b")),
    "subclass": (lambda: Names(["a"]), replaced),
    "set of equal size": (lambda: {1, 2}, exchanged),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda m: m.kept.append(3)),
    "defaultdict": (lambda: defaultdict(list, a=[]), lambda m: m.kept["b"].append(1)),
    "counter": (lambda: Counter("aab"), lambda m: m.kept.update("a")),
    "order": (lambda: OrderedDict(a=1, b=2), moved),
}


@pytest.mark.parametrize("kind", MADE)
def test_containers_are_restored(kind: str) -> None:
    make, change = MADE[kind]
    module: Any = nn.Module()
    module.kept = before = make()
    snapshot, constants = Untraced(module), Constants([("", module)])
    assert snapshot.undo() == constants.changed() == []
    change(module)
    assert constants.changed() == ["kept"]
    assert snapshot.undo() == ["kept"]
    assert module.kept is before and module.kept == make() and list(module.kept) == list(make())


def test_hooks_are_removed_and_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    kept = model[0].register_forward_hook(lambda module, args, output: None)
    snapshot = Untraced(model)
    kept.remove()
    late = model[0].register_forward_pre_hook(lambda module, args: None)
    assert snapshot.undo() == ["0._forward_hooks", "0._forward_pre_hooks"] and snapshot.undo() == []
    assert [list(table) for table in hook_tables(model[0]).values() if table] == [[kept.id]]
    late.remove()
    kept.remove()
    assert not any(hook_tables(model[0]).values())
