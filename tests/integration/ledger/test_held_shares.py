"""What holds shares, in the model: runs that find each of its checks which is taken out."""

import pytest

from shared.model.devices.enforcers import HeldBy
from tests.integration.ledger.test_protocol import check_found, do
from tests.model.rules import Step

ONLY_A = (do.cordon_or_uncordon(position=1), do.work(), do.work())
"""All placers know that node b is cordoned: the driver of node a limits memory."""
BY_DRIVER = HeldBy(memory="driver", compute="none")
BY_LIBRARY = HeldBy(memory="hami-core", compute="hami-core")
HELD_BY_DRIVER = (
    do.create_demanding_pods(mib=(60,), demand=BY_DRIVER),
    do.flow(),
    do.work(),
)
HELD_BY_BOTH = (
    *ONLY_A,
    do.create_demanding_pods(mib=(30,), demand=BY_DRIVER),
    do.create_demanding_pods(mib=(30,), demand=BY_LIBRARY),
    do.deliver(deliveries=((0, 0, True), (0, 1, True))),
)
"""Two placers choose different modes of a device that has none."""
BY_LIBRARY_ALONE = (
    *ONLY_A,
    do.create_demanding_pods(mib=(30,), demand=BY_LIBRARY),
    do.flow(),
)
VANISHED = (*HELD_BY_DRIVER, do.limits_vanish(position=0, what="all"))
SHRINK_BY_DRIVER = (
    do.create_demanding_pods(mib=(60,), demand=HeldBy(memory="driver")),
    do.flow(),
    do.work(),
    do.use_memory(position=0, percent=100, uncounted=True),
    do.resize(position=0, mib=30, number=0),
    do.work(),
)
"""The driver ignores a lower limit than the use, which the library does not count."""
SHRINK_WHILE_KEPT = (
    *ONLY_A,
    *HELD_BY_DRIVER,
    do.driver_keeps_limits_or_lowers(node="a"),
    do.resize(position=0, mib=30, number=0),
    do.work(),
)
"""The driver ignores a lower limit for a while, although little is in use."""
OTHER_PROGRAM = (
    do.other_program_limits_or_not(node="a", position=1),
    *(do.pass_time(seconds=31.0),) * 3,
    do.other_program_limits_or_not(node="a", position=1),
    *HELD_BY_DRIVER,
)
"""Another program limits memory for a while, by a limit of its own."""


@pytest.mark.parametrize(
    ("name", "steps", "invariant"),
    [
        ("leases shrink before limits", SHRINK_BY_DRIVER, "S7"),
        ("limits that the driver keeps count as lowered", SHRINK_BY_DRIVER, "S7"),
        ("limits that the driver keeps count as lowered", SHRINK_WHILE_KEPT, "S7"),
        ("sizes that wait are not tried again", SHRINK_WHILE_KEPT, "S7"),
        ("limits of other programs do not matter", OTHER_PROGRAM, "S7"),
        ("limits that vanish are not put back", VANISHED, "S7"),
        ("containers are not limited before they run", HELD_BY_DRIVER, "S7"),
        ("pods are not limited before their containers", HELD_BY_DRIVER, "S7"),
        ("demands of enforcers do not matter", BY_LIBRARY_ALONE, "S7"),
        ("sharing modes do not matter", HELD_BY_BOTH, "S1"),
    ],
)
def test_these_steps_find_the_mutation_and_nothing_else(
    name: str, steps: tuple[Step, ...], invariant: str
) -> None:
    check_found(name, steps, invariant)
