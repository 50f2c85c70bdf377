"""Every element is on one server, and servers have as much as each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tutti.parallel.parameter_server.server_partition import Size, plan_servers

SIZES = st.lists(
    st.builds(lambda n, kind: Size(n, *kind), st.integers(1, 5000), st.sampled_from([(4, "f"), (8, "d"), (2, "h")])),
    min_size=1,
    max_size=12,
)


@given(SIZES, st.integers(1, 5), st.booleans())
def test_every_element_is_on_one_server(sizes: list[Size], servers: int, whole: bool) -> None:
    found = plan_servers(sizes, servers, whole)
    seen: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(sizes))}
    for server in range(servers):
        regions = found.regions(server)
        for section, index, begin, end, at in found.slices(server):
            seen[index].append((begin, end))
            assert (at + end - begin) * found.sections[section].itemsize <= len(regions[section])
    for index, ranges in seen.items():
        joined = [n for begin, end in sorted(ranges) for n in (begin, end)]
        assert joined[0] == 0 and joined[-1] == sizes[index].elements and joined[1:-1:2] == joined[2:-1:2]
        assert not whole or len(ranges) == 1


@given(SIZES, st.integers(1, 5), st.booleans())
def test_servers_are_balanced_within_a_tenth_or_one_slice(sizes: list[Size], servers: int, whole: bool) -> None:
    found = plan_servers(sizes, servers, whole)
    loads = [sum(map(len, found.regions(server))) for server in range(servers)]
    largest = max(size.elements * size.itemsize for size in sizes)
    room = (largest if whole else 64 * len(found.sections)) + 64 * len(sizes)
    assert max(loads) - min(loads) <= max(0.1 * sum(loads) / servers, room)
