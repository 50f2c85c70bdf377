"""Hosts with different numbers of ranks, as their launchers describe them: no strategy counts on equal ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.forkserver import Process
from tests.launching import SAFETY_NET, free_port
from tutti.errors import UsageError
from tutti.process_context import read_identity

SCRIPT = """
import json
import torch
from torch import nn
from torch.utils.data import TensorDataset
import tutti

draw = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(22, 4, generator=draw).double(), torch.randn(22, 1, generator=draw).double())
found = {}
for strategy in ("mirrored", "sharded:stage=1", "sharded:stage=3", "tensor:least=1", "local_sgd:period=1",
                 "hybrid:shards=2,tensor=2"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    workers = 1 if strategy.startswith("tensor") else 4
    run = tutti.prepare(model, "sgd:lr=0.1", data, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]),
                        strategy=strategy, batch_size=11, workers=workers)
    for batch in run.epoch(0):
        run.step(batch)
    found[strategy] = [float(t.double().sum()) for t in run.state().values()]
if tutti.rank() == 0:
    print(json.dumps(found))
"""
HOSTS = (1, 1, 2)


def environments(hosts: tuple[int, ...]) -> list[dict[str, str]]:
    """What torchrun tells each rank of hosts with these numbers of ranks."""
    port = free_port()
    return [
        {
            **{"RANK": str(sum(hosts[:host]) + local), "WORLD_SIZE": str(sum(hosts)), "LOCAL_RANK": str(local)},
            **{"LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": str(len(hosts))},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        }
        for host, size in enumerate(hosts)
        for local in range(size)
    ]


def results(hosts: tuple[int, ...], script: Path) -> dict[str, list[float]]:
    ended = started(environments(hosts), script)
    assert [code for code, *_ in ended] == [0] * len(ended), ended
    found: dict[str, list[float]] = json.loads(ended[0][1].splitlines()[-1])
    return found


def started(told: Sequence[Mapping[str, str]], script: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of the ranks of a script, one for each environment."""
    plain = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [Process([str(script)], script.parent, {**plain, **own}) for own in told]
    try:
        said = [rank.communicate(timeout=SAFETY_NET) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.wait(), *texts) for rank, texts in zip(ranks, said, strict=True)]


def test_strategies_on_uneven_hosts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    uneven, even = results(HOSTS, script), results((sum(HOSTS),), script)
    assert uneven.keys() == even.keys()
    for strategy, sums in even.items():
        assert uneven[strategy] == pytest.approx(sums, abs=1e-12), strategy


@pytest.mark.parametrize(("hosts", "alike"), [((1, 2), False), ((1, 1), True)], ids=str)
def test_every_rank_says_whether_hosts_have_equally_many_ranks(
    hosts: tuple[int, ...], alike: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tutti.horovod.torch as hvd\nhvd.init()\nprint(hvd.is_homogeneous())\n")
    assert [text.split() for _, text, _ in started(environments(hosts), script)] == [[str(alike)]] * sum(hosts)


def test_hosts_that_cannot_be_told_apart_are_refused() -> None:
    told = [{k: v for k, v in own.items() if not k.startswith("GROUP")} for own in environments((2, 2, 3))]
    refused = 0
    for own in told:
        try:
            read_identity(own)
        except UsageError as error:
            assert "cannot be distinguished" in str(error)
            refused += 1
    assert refused == len(told)


def test_identity_on_uneven_hosts() -> None:
    found = [read_identity(own) for own in environments((2, 2, 4))]
    assert [identity.local_size for identity in found] == [2, 2, 2, 2, 4, 4, 4, 4]
    assert [identity.cross_rank for identity in found] == [0, 0, 1, 1, 2, 2, 2, 2]


def test_ranks_that_count_different_nodes_are_refused(tmp_path: Path) -> None:
    """One, one and two ranks a host, without a launcher that numbers the hosts: some ranks would count four."""
    script = tmp_path / "script.py"
    script.write_text("import tutti\ntutti.init()\n")
    ranks = [
        {name: value for name, value in environ.items() if not name.startswith("GROUP_")}
        for environ in environments((1, 1, 2))
    ]
    for code, _, said in started(ranks, script):
        assert code != 0 and "ranks count different numbers of nodes" in said, said
