"""What a transformer gets of a GPU that it shares, beside one that has a GPU of its own.

Each token is waited for, so that the GPU is idle between them: two pods can have more than a half.
"""

from collections.abc import Sequence

import pytest

from tests.hardware.conftest import Add, AddPod, AddTimeContainer
from tests.hardware.machine import Machine
from tests.hardware.private_mps import PrivateMps
from tests.support.gpu_driver import GpuLoad

SECONDS = 5
SHOWN = "tokens per second of a transformer of 1 GB, and p99 of a token"


def served(*programs: GpuLoad) -> Sequence[dict[str, float]]:
    """Have programs generate tokens at once; return what each measured, and end them."""
    for seconds in (1, SECONDS):  # the first time they load it
        for program in programs:
            program.send(f"serve {seconds}")
        results = [program.result() for program in programs]
    for program in programs:
        program.kill()
    pairs = [dict(word.split("=") for word in text.split()) for text in results]
    return [{name: float(text) for name, text in words.items()} for words in pairs]


def two_pods(machine: Machine, form: str, request: pytest.FixtureRequest) -> Sequence[GpuLoad]:
    """Start PyTorch in two containers, each limited to a half by this form."""
    names = ("a", "b")
    if form == "HAMi-core":
        pods: AddPod = request.getfixturevalue("pods")
        half = machine.gpu.usable_mib // 2
        return [pods(name, mib=half, cores=50).torch() for name in names]
    if form == "GPU time":
        containers: AddTimeContainer = request.getfixturevalue("time_containers")
        return [containers(50).torch() for _ in names]
    if form == "MPS":
        mps: PrivateMps = request.getfixturevalue("mps")
        return [machine.torch(**mps.start(name, percent=50)) for name in names]
    return [machine.torch() for _ in names]


@pytest.fixture(scope="module")
def dedicated() -> dict[str, float]:
    """What it gets of the whole GPU; measured once."""
    return {}


@pytest.mark.parametrize("form", ["nothing", "HAMi-core", "GPU time", "MPS"])
def test_two_pods_beside_a_dedicated_gpu(
    torch_machine: Machine,
    request: pytest.FixtureRequest,
    dedicated: dict[str, float],
    seen: Add,
    form: str,
) -> None:
    if not dedicated:
        dedicated |= served(torch_machine.torch())[0]
        shows = f"{SHOWN}, alone"
        seen(shows, f"{dedicated['per_s']:.0f}, {dedicated['p99_ms']:.2f} ms")
    both = served(*two_pods(torch_machine, form, request))

    cells = [
        f"{got['per_s']:.0f} ({100 * got['per_s'] / dedicated['per_s']:.0f} %), "
        f"{got['p99_ms']:.2f} ms"
        for got in both
    ]
    words = "no limits" if form == "nothing" else f"half of the GPU each by {form}"
    seen(f"{SHOWN}, two pods, {words}", " and ".join(cells))
