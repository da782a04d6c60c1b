"""Changes the layouts of devices in MIG mode: the one part of the agent that needs the right to.

Everything it is told is plain data, so that it can run in a process of its own, which has that
right while the agent has not.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from services.node_agent.mig.instances import (
    Complete,
    Create,
    Destroy,
    InstanceProfile,
    MigInstance,
    Step,
    describe_instances,
    is_laid_out,
    plan_layout,
)
from shared.model.device import MigLayout
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

T = TypeVar("T")

STEP_S = 15.0
"""A driver that takes longer than this to make or remove an instance does not come back."""


class MigDriver(Protocol):
    """The driver's MIG calls; each raises UnavailableError in the driver's words."""

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a device."""
        ...

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        """Make an instance at a place; return its id."""
        ...

    async def create_compute(self, device: DeviceUuid, gi: int) -> None:
        """Make the compute instance that takes all of an instance."""
        ...

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        """Remove a compute instance."""
        ...

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        """Remove an instance without compute instances."""
        ...


class Partitioner:
    """Brings devices to layouts, step by step, and looks whether it has worked."""

    def __init__(self, driver: MigDriver) -> None:
        self.driver = driver

    async def partition(
        self,
        device: DeviceUuid,
        layout: MigLayout,
        profiles: Sequence[InstanceProfile],
        held: Collection[str],
    ) -> tuple[MigInstance, ...]:
        """Give the device this layout; return its instances, all of them ready.

        `held` are UUIDs of instances that stay. What an earlier, failed attempt has left is used
        or removed. Raises InUseError while somebody uses what is in the way, RequestError if the
        layout cannot be, UnavailableError if the driver fails, with what the device has then.
        """
        before = await self._call(device, "list its instances", self.driver.instances(device))
        ids = {instance.gi for instance in before if instance.uuid in held}
        steps = plan_layout(layout, profiles, before, ids)
        for step in steps:
            await self._apply(device, step)
        after = await self._call(device, "list its instances", self.driver.instances(device))
        if not is_laid_out(layout, after):
            raise UnavailableError(
                f"the driver reported no error, but device {device} has "
                f"{describe_instances(after)} instead of layout {layout.name}"
            )
        if steps:
            logger.info(
                "device %s is laid out as %s: %s", device, layout.name, describe_instances(after)
            )
        return after

    async def _apply(self, device: DeviceUuid, step: Step) -> None:
        driver = self.driver
        match step:
            case Destroy(instance):
                what = f"remove {describe_instances([instance])}"
                for compute in instance.compute_ids:
                    await self._call(
                        device, what, driver.destroy_compute(device, instance.gi, compute)
                    )
                await self._call(device, what, driver.destroy_instance(device, instance.gi))
            case Complete(instance):
                what = f"complete {describe_instances([instance])}"
                await self._call(device, what, driver.create_compute(device, instance.gi))
            case Create(profile, start):
                what = f"make {profile.name} at slice {start}"
                gi = await self._call(
                    device, what, driver.create_instance(device, profile.id, start)
                )
                await self._call(device, what, driver.create_compute(device, gi))

    @staticmethod
    async def _call(device: DeviceUuid, what: str, call: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(STEP_S):
                return await call
        except TimeoutError as error:
            raise UnavailableError(
                f"the driver did not {what} of device {device} within {STEP_S:g} s: look at "
                "`nvidia-smi` and at the kernel log for Xid messages"
            ) from error
        except UnavailableError as error:
            raise UnavailableError(
                f"the driver did not {what} of device {device}: {error}"
            ) from error
