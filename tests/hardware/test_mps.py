"""MPS with a daemon for each container: its limits, what it costs, and kills of clients at work."""

import time
from statistics import median

import pytest

from tests.hardware.conftest import Add
from tests.hardware.machine import Machine
from tests.hardware.private_mps import PrivateMps
from tests.hardware.test_time import KINDS, percents
from tests.support.waiting import until_blocking

LIMIT_MIB = 4096
KILLS = 8
AT_WORK_S = 0.2
"""How long a program computes before it is killed: its queue is full by then."""
LATER_S = 0.007
"""Each kill comes later by that, in another moment of a kernel."""


def test_memory_with_mps(machine: Machine, mps: PrivateMps, seen: Add) -> None:
    variables = mps.start("memory", mib=LIMIT_MIB)
    ways = ("alloc", "managed", "async", "create", "pool", "graph", "direct")
    for way in ways if machine.real else ways[:1]:
        load = machine.load(**variables)
        try:
            given = load.value(f"fill {way} {LIMIT_MIB + 512}", "mib")
        finally:
            load.kill()
        holds = given < LIMIT_MIB
        shows = f"MPS: MiB given by `{way}`, limit {LIMIT_MIB} with its context"
        seen(shows, given, f"less than {LIMIT_MIB}", holds=holds)


@pytest.mark.parametrize("kind", ["kernels of 1 ms", "kernels of 20 ms"])
@pytest.mark.parametrize("limits", [(25,), (50,), (25, 75)], ids=str)
def test_compute_with_mps(
    real: Machine, mps: PrivateMps, seen: Add, limits: tuple[int, ...], kind: str
) -> None:
    loads = [
        real.load(**mps.start(f"pod-{number}", percent=percent))
        for number, percent in enumerate(limits)
    ]
    got = percents(real, KINDS[kind], *loads)
    for load in loads:
        load.kill()
    shows = f"MPS: percent with {' and '.join(map(str, limits))}, {kind}"
    seen(shows, " and ".join(map(str, got)))


@pytest.mark.parametrize("drains", [False, True], ids=["without-drain", "with-drain"])
def test_kills_of_clients_at_work(
    machine: Machine, mps: PrivateMps, seen: Add, drains: bool
) -> None:
    """A server that hangs is seen by a new client, and started anew."""
    kills = 2 if machine.quick else KILLS
    hung = 0
    variables = mps.start("killed")
    for number in range(kills):
        load = machine.load(**variables)
        load.send(f"flood 60s 20000 kernel {machine.loops}")
        clients = until_blocking(lambda: mps.clients("killed"))
        time.sleep(AT_WORK_S + number * LATER_S)
        ends = mps.terminate("killed", clients) if drains else True
        load.kill()
        if not ends or not mps.probe("killed"):
            hung += 1
            mps.repair("killed")
    words = "after the work of each was ended" if drains else "in the middle of their work"
    shows = f"MPS: servers that hang once their client was killed, {words}"
    seen(shows, f"{hung} of {kills}", "0" if drains else "", holds=not hung if drains else None)


def test_launches_with_mps(real: Machine, mps: PrivateMps, seen: Add) -> None:
    bare = real.load()
    load = real.load(**mps.start("launches"))
    rates = [[program.value("launches 1s", "per_s") for program in (bare, load)] for _ in range(3)]
    without, held = (median(rate) for rate in zip(*rates, strict=True))
    figure = f"{without:,.0f}, {held:,.0f}: {(held / without - 1) * 100:+.1f} %"
    seen("launches per second, without and with MPS", figure)
    bare.kill()
    load.kill()
