"""Cache of process groups, which are expensive to make."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tutti.device import collective_options
from tutti.launcher import context, heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.torch_compat import set_group_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Key = tuple[Any, tuple[int, ...], str]

_cache: dict[_Key, tuple[ProcessGroup | None, ProcessGroup | None]] = {}

_messages: dict[_Key, int] = {}
"""For each channel of point-to-point messages, how many this process has started to send or to receive."""


def _key(ranks: tuple[int, ...], purpose: str) -> _Key:
    return dist.group.WORLD, ranks, purpose


def process_groups(ranks: tuple[int, ...], purpose: str = "") -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return two process groups of ``ranks``, one for control messages and one for gradients, made once and cached.

    The first call for ``ranks`` and ``purpose`` makes the groups, blocks, and is collective over all ranks of the job,
    members or not, as ``dist.new_group``. Later calls are local.

    Args:
        ranks: global ranks of the members, in increasing order.
        purpose: distinguishes several gradient groups of the same ranks, whose messages do not wait for each other;
            they share the control group.

    Returns:
        The control group (Gloo, CPU tensors), and the gradient group (default backend); both None for a single rank. On
        a rank that is no member both are what ``dist.new_group`` returns there, ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        UsageError: ``tutti.init`` was not called.
        RuntimeError: a rank did not make the call in time.
    """
    if len(ranks) == 1:
        return None, None
    key = _key(ranks, purpose)
    if key not in _cache:
        # PyTorch's default is 30 minutes. 60 s more than tutti's own timeout, so that tutti's error comes first.
        limit, device = timedelta(seconds=context.current().timeout + 60), context.current().device
        brief = context.connect_limit(limit, device)
        with heartbeat.training.during(Phase.CONNECTING):
            control = (
                process_groups(ranks)[0] if purpose else dist.new_group(list(ranks), backend="gloo", timeout=brief)
            )
            fast = dist.new_group(list(ranks), timeout=brief, pg_options=collective_options(device, limit))
        if brief != limit and context.rank() in ranks:
            for group in (control, fast):
                set_group_timeout(group, limit)
        _cache[key] = (control, fast)
    return _cache[key]


def channel_purpose(kind: str, sender: int) -> str:
    """Return the ``purpose`` argument of ``process_groups`` for point-to-point messages of one kind from one rank.

    Sender and receiver must both call ``process_groups`` with it, to get the same group of the two ranks. Makes no
    group itself.

    Args:
        kind: name of the kind of message.
        sender: global rank of the sender.
    """
    return f"{kind} from rank {sender}"


def count_message(ranks: tuple[int, ...], purpose: str) -> int:
    """Add 1 to the number of messages that this process has started on a channel, and return the new number.

    A channel is the pair of process groups that ``process_groups`` makes for messages from one rank to another.

    Args:
        ranks: the channel's two global ranks, in increasing order.
        purpose: the channel's ``channel_purpose``.
    """
    key = _key(ranks, purpose)
    _messages[key] = _messages.get(key, 0) + 1
    return _messages[key]


def messages_on(ranks: tuple[int, ...], purpose: str) -> int | None:
    """Return how many messages this process has started on a channel; None if it has no process groups for it yet.

    Args:
        ranks: the channel's two global ranks, in increasing order.
        purpose: the channel's ``channel_purpose``.
    """
    key = _key(ranks, purpose)
    return _messages.get(key, 0) if key in _cache else None


def replace_channel(ranks: tuple[int, ...], purpose: str) -> None:
    """Forget the process groups of a channel, so that the next ``process_groups`` makes new ones. Not collective.

    Messages that are still on the old groups are never received. All ranks of the job must make the same call, because
    ``process_groups`` is then collective again.

    Args:
        ranks: the channel's two global ranks, in increasing order.
        purpose: the channel's ``channel_purpose``.
    """
    key = _key(ranks, purpose)
    del _cache[key]
    _messages.pop(key, None)
