"""Who am I: every launcher's variables as they come, and the same with something wrong."""

from __future__ import annotations

import pytest

from tutti.errors import UsageError
from tutti.world.identity import Identity, first_host, joined, of_group, read, rendezvous

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "3",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, Identity(5, 8, 1, 4, 1, 2, "torchrun", 2)),
        (HOROVOD, Identity(3, 4, 1, 2, 1, 2, "horovod", 0)),
        (SLURM, Identity(6, 7, 0, 1, 3, 4, "slurm", 0)),
        (OPENMPI, Identity(2, 3, 2, 3, 0, 1, "openmpi", 0)),
        ({}, Identity()),
    ],
)
def test_every_launcher(environ: dict[str, str], expected: Identity) -> None:
    assert read(environ) == expected
    assert joined(environ) == (expected.source != "single")


def test_torchrun_comes_before_horovod_before_slurm_before_open_mpi() -> None:
    assert read(OPENMPI | SLURM | HOROVOD | TORCHRUN).source == "torchrun"
    assert read(OPENMPI | SLURM | HOROVOD).source == "horovod"
    assert read(OPENMPI | SLURM).source == "slurm"


def test_hosts_follow_where_torchrun_s_group_is_left_out() -> None:
    plain = {name: value for name, value in TORCHRUN.items() if not name.startswith("GROUP")}
    assert read(plain) == read(TORCHRUN)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_slurm_batch_script_or_interactive_shell_is_no_step(step: str | None) -> None:
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert read(environ) == Identity()


def test_a_slurm_step_of_one_task_does_not_count_as_a_launched_job() -> None:
    one = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
    environ = SLURM | one | {"SLURM_STEP_TASKS_PER_NODE": "1"}
    assert read(environ).size == 1
    assert not joined(environ)


def test_a_slurm_step_smaller_than_its_job() -> None:
    environ = SLURM | {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_PROCID": "2",
        "SLURM_NODEID": "1",
    }
    assert read(environ) == Identity(2, 3, 0, 1, 1, 2, "slurm")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK is 8"),
        (TORCHRUN | {"RANK": "five"}, "RANK is 'five'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4"),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is 0"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is missing"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"HOROVOD_RANK": "0"}, "HOROVOD_SIZE is missing"),
        (HOROVOD | {"HOROVOD_CROSS_RANK": "2"}, "HOROVOD_CROSS_RANK is 2"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, "SLURM_STEP_TASKS_PER_NODE is '2(y3)'"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_TASKS_PER_NODE is '2(x3)'"),
        (SLURM | {"SLURM_NODEID": "4"}, "SLURM_NODEID is 4"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is missing"),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 3"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(environ)
    assert named in str(refused.value)


def test_master_variables_decide_where_to_meet() -> None:
    assert rendezvous(TORCHRUN, read(TORCHRUN)) == ("node1", 29500)
    own = SLURM | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234"}
    assert rendezvous(own, read(own)) == ("elsewhere", 1234)


def test_slurm_meets_on_its_first_host_at_a_port_of_the_step() -> None:
    address, port = rendezvous(SLURM, read(SLURM))
    assert address == "gpu07"
    assert 10_000 <= port < 30_000
    other = SLURM | {"SLURM_STEP_ID": "1"}
    assert rendezvous(other, read(other))[1] != port


def test_one_host_meets_on_loopback() -> None:
    address, port = rendezvous(OPENMPI, read(OPENMPI))
    assert address == "127.0.0.1"
    assert 10_000 <= port < 30_000
    assert rendezvous({}, Identity()) == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (HOROVOD, "MASTER_ADDR is missing"),
        (HOROVOD | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "node1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}, "MASTER_ADDR"),
        (HOROVOD | {"MASTER_ADDR": "node1"}, "MASTER_PORT is missing"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
)
def test_nowhere_to_meet(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        rendezvous(environ, read(environ))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[01-03,7]", "node01"),
        ("a,b[1-2]", "a"),
        ("r[1-2]n[3-4]-ib,x", "r1n3-ib"),
        ("single.example.org", "single.example.org"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_an_unreadable_node_list_is_refused() -> None:
    with pytest.raises(UsageError, match="as a list of hosts"):
        first_host("]")


def test_a_group_that_the_user_made() -> None:
    assert of_group(5, 8, TORCHRUN) == read(TORCHRUN)
    assert of_group(1, 2, TORCHRUN) == Identity(1, 2, 1, 2)
    assert of_group(1, 2, {"RANK": "1", "WORLD_SIZE": "2"}) == Identity(1, 2, 1, 2)
