"""Who am I: every launcher's variables as they come, and the same with something wrong."""

from __future__ import annotations

import pytest

from tutti.errors import UsageError
from tutti.process_context import Identity, first_host, identity_of_group, joined, read_identity, rendezvous

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
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "6",
    "PMI_FD": "6",
    "MPI_LOCALRANKID": "2",
    "MPI_LOCALNRANKS": "3",
}
PALS = {
    "PALS_APID": "0f1e2d3c-4b5a",
    "PALS_RANKID": "1",
    "PALS_NODEID": "0",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
FLUX = {
    "FLUX_JOB_ID": "ƒ3ETxsR9H",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    # Its shell serves PMI, too.
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "7",
}
SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
SHELL |= {"SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, Identity(5, 8, 1, 4, 1, 2, "torchrun", 2)),
        (HOROVOD, Identity(3, 4, 1, 2, 1, 2, "horovod", 0)),
        (SLURM, Identity(6, 7, 0, 1, 3, 4, "slurm", 0)),
        (OPENMPI, Identity(2, 3, 2, 3, 0, 1, "openmpi", 0)),
        (HYDRA, Identity(5, 6, 2, 3, 1, 2, "hydra", 0)),
        (PALS, Identity(1, 4, 1, 2, 0, 2, "pals", 0)),
        (FLUX, Identity(3, 4, 1, 2, 1, 2, "flux", 0)),
        ({}, Identity()),
    ],
)
def test_every_launcher(environ: dict[str, str], expected: Identity) -> None:
    assert read_identity(environ) == expected
    assert joined(environ) == (expected.source != "single")


def test_torchrun_comes_before_horovod_before_the_others() -> None:
    assert read_identity(OPENMPI | SLURM | HOROVOD | TORCHRUN).source == "torchrun"
    assert read_identity(OPENMPI | SLURM | HOROVOD).source == "horovod"


@pytest.mark.parametrize(("inner", "rank", "size"), [(OPENMPI, 2, 3), (HYDRA, 5, 6), (PALS, 1, 4), (FLUX, 3, 4)])
def test_the_launcher_inside_a_slurm_step_is_meant(inner: dict[str, str], rank: int, size: int) -> None:
    """From an interactive shell, or by processes that the launcher has started as a step: the step's are others."""
    for outer in (SLURM, SHELL):
        assert (read_identity(outer | inner).rank, read_identity(outer | inner).size) == (rank, size)
        assert joined(outer | inner)
    step = SLURM | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_NNODES": str(size)}
    step |= {"SLURM_STEP_TASKS_PER_NODE": f"1(x{size})", "SLURM_NODEID": str(rank)}
    # The same numbers: started by srun with this PMI, and Slurm knows the hosts.
    assert read_identity(step | inner) == Identity(rank, size, 0, 1, rank, size, "slurm")


def test_a_hydra_inside_flux_or_pals_is_meant() -> None:
    assert read_identity(FLUX | HYDRA).source == read_identity(PALS | HYDRA).source == "hydra"


def test_an_older_pals_leaves_the_ranks_of_a_host_to_its_pmi() -> None:
    assert read_identity(without(PALS, "PALS_LOCAL_SIZE")) == read_identity(PALS)


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "3"},
        SHELL | {"PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"},
        SLURM | {"SLURM_STEP_ID": "4294967290", "PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"},
        FLUX | {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "0"},
    ],
)
def test_a_shell_of_one_task_is_no_launched_job(environ: dict[str, str]) -> None:
    assert read_identity(environ).size == 1
    assert not joined(environ)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (without(HYDRA, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "MPI_LOCALRANKID is missing"),
        (without(HYDRA, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS is missing"),
        (without(HYDRA, "PMI_SIZE"), "PMI_SIZE is missing"),
        (without(HYDRA, "PMI_RANK"), "PMI_RANK is missing"),
        ({"PMI_SIZE": "2"}, "PMI_RANK is missing"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is missing"),
        (without(PALS, "PMI_SIZE"), "PMI_SIZE is missing"),
        (without(FLUX, "FLUX_JOB_NNODES"), "FLUX_JOB_NNODES is missing"),
        (FLUX | {"FLUX_JOB_NNODES": "3"}, "FLUX_JOB_NNODES is 3"),
        ({"FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE is '4'"),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, "MV2_COMM_WORLD_SIZE is '2'"),
        ({"JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_SIZE is '4'"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun"}, "PMIX_RANK is '0'"),
        (SHELL | {"MV2_COMM_WORLD_SIZE": "2"}, "but slurm says that this process is alone"),
        (
            HYDRA | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "PMI_SIZE is '6', but torchrun says that this process is alone",
        ),
        # Ranks dealt out to hosts in turn, and hosts with different numbers of ranks.
        (HYDRA | {"PMI_RANK": "1", "MPI_LOCALRANKID": "0"}, "PMI_RANK is 1 of 6 and MPI_LOCALRANKID is 0 of 3"),
        (HYDRA | {"MPI_LOCALNRANKS": "4"}, "PMI_SIZE is 6 and MPI_LOCALNRANKS is 4"),
        (FLUX | {"FLUX_TASK_LOCAL_ID": "0"}, "FLUX_TASK_RANK is 3 of 4 and FLUX_TASK_LOCAL_ID is 0 of 2"),
    ],
)
def test_what_is_seen_and_not_understood_is_refused(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_identity(environ)
    assert named in str(refused.value)


def test_a_script_that_torchrun_started_as_one_process_of_many_is_alone() -> None:
    """``mpirun -n 2 torchrun --standalone script.py`` are two runs, and meant to be."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert read_identity(HYDRA | one) == Identity(source="torchrun")


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        (PALS | {"PMI_SIZE": "2"}, PALS),
        (
            FLUX | {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "FLUX_JOB_NNODES": "1"},
            FLUX,
        ),
    ],
)
def test_one_host_meets_at_a_port_of_the_job_and_several_need_an_address(
    environ: dict[str, str], hosts: dict[str, str]
) -> None:
    address, port = rendezvous(environ, read_identity(environ))
    assert address == "127.0.0.1" and 10_000 <= port < 30_000
    assert rendezvous(environ, read_identity(environ)) == (address, port)
    with pytest.raises(UsageError, match="MASTER_ADDR is missing"):
        rendezvous(hosts, read_identity(hosts))


def test_jobs_of_one_host_meet_apart() -> None:
    first = PALS | {"PMI_SIZE": "2"}
    second = first | {"PALS_APID": "another"}
    assert rendezvous(first, read_identity(first)) != rendezvous(second, read_identity(second))


def test_hosts_follow_where_torchrun_s_group_is_left_out() -> None:
    plain = {name: value for name, value in TORCHRUN.items() if not name.startswith("GROUP")}
    assert read_identity(plain) == read_identity(TORCHRUN)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_slurm_batch_script_or_interactive_shell_is_no_step(step: str | None) -> None:
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert read_identity(environ) == Identity()


def test_a_slurm_step_of_one_task_does_not_count_as_a_launched_job() -> None:
    one = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
    environ = SLURM | one | {"SLURM_STEP_TASKS_PER_NODE": "1"}
    assert read_identity(environ).size == 1
    assert not joined(environ)


def test_a_slurm_step_smaller_than_its_job() -> None:
    environ = SLURM | {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_PROCID": "2",
        "SLURM_NODEID": "1",
    }
    assert read_identity(environ) == Identity(2, 3, 0, 1, 1, 2, "slurm")


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
        read_identity(environ)
    assert named in str(refused.value)


def test_master_variables_decide_where_to_meet() -> None:
    assert rendezvous(TORCHRUN, read_identity(TORCHRUN)) == ("node1", 29500)
    own = SLURM | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234"}
    assert rendezvous(own, read_identity(own)) == ("elsewhere", 1234)


def test_slurm_meets_on_its_first_host_at_a_port_of_the_step() -> None:
    address, port = rendezvous(SLURM, read_identity(SLURM))
    assert address == "gpu07"
    assert 10_000 <= port < 30_000
    other = SLURM | {"SLURM_STEP_ID": "1"}
    assert rendezvous(other, read_identity(other))[1] != port


def test_a_slurm_step_on_one_host_meets_on_loopback_since_its_name_need_not_resolve() -> None:
    names = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    one = {**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    one |= dict(zip(names, ("0", "1", "2", "unknown-node"), strict=True))
    address, port = rendezvous(one, read_identity(one))
    assert address == "127.0.0.1" and 10_000 <= port < 30_000


def test_one_host_meets_on_loopback() -> None:
    address, port = rendezvous(OPENMPI, read_identity(OPENMPI))
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
        rendezvous(environ, read_identity(environ))


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
    assert identity_of_group(5, 8, TORCHRUN) == read_identity(TORCHRUN)
    assert identity_of_group(1, 2, TORCHRUN) == Identity(1, 2, 1, 2)
    assert identity_of_group(1, 2, {"RANK": "1", "WORLD_SIZE": "2"}) == Identity(1, 2, 1, 2)
