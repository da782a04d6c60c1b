"""What a limit of cores leaves to processes: a target, and no bound.

The GPU's time is what kernels need whose duration was measured before, on a GPU of its own.
"""

import pytest

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine

KERNELS = {"long": 20_000, "short": 1_000, "tiny": 20}
"""Microseconds of a kernel."""


def burn(machine: Machine, pods: AddPod, kernel_us: int, *limits: int) -> list[int]:
    """Have pods with these limits compute at once; return the percent of the GPU that each got."""
    warm, measured = (0.5, 1) if machine.quick else (3, 3)
    loops = machine.loops
    loads = [pods(f"burn{n}", mib=4096, cores=limit).load() for n, limit in enumerate(limits)]
    for seconds in (warm, measured):
        for load in loads:
            load.send(f"burn {seconds}s {kernel_us} 640 {loops}")
        results = [load.result() for load in loads]
    return [int(one.partition("busy=")[2].split()[0]) for one in results]


@pytest.mark.parametrize("limit", [25, 50, 75])
@pytest.mark.parametrize("kind", KERNELS)
def test_one_pod_with_a_limit(
    machine: Machine, pods: AddPod, seen: Add, kind: str, limit: int
) -> None:
    if machine.quick and (kind, limit) != ("short", 25):
        pytest.skip("one case is enough in `make test`")
    (got,) = burn(machine, pods, KERNELS[kind], limit)

    bound = None if machine.real or machine.library else got <= limit + 15
    seen(f"percent of the GPU, limit {limit}, {kind} kernels", got, limit, holds=bound)


@pytest.mark.parametrize("kind", KERNELS)
def test_two_pods_that_want_everything(
    machine: Machine, pods: AddPod, seen: Add, kind: str
) -> None:
    if machine.quick and kind != "short":
        pytest.skip("one case is enough in `make test`")
    for limits in ((100, 100), (25, 75)):
        got = burn(machine, pods, KERNELS[kind], *limits)
        words = "no limits" if limits[0] == 100 else "limits {} and {}".format(*limits)
        seen(f"percent that two pods got, {words}, {kind} kernels", "{} and {}".format(*got))
        assert all(one > 0 for one in got)
