"""Changes the layouts of devices in MIG mode: the only part of the agent that needs privileges."""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from services.node_agent.mig.instances import (
    InstanceProfile,
    MigInstance,
    describe_instances,
    is_laid_out,
)
from services.node_agent.mig.layout_plan import (
    CompleteInstance,
    CreateInstance,
    DestroyInstance,
    PlanStep,
    plan_layout,
)
from shared.model.devices.device import MigLayout
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

T = TypeVar("T")

STEP_S = 15.0
"""Time limit of the driver to create or destroy an instance."""


class MigDriver(Protocol):
    """Each call raises UnavailableError with the driver's message."""

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]: ...

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int: ...

    async def create_compute(self, device: DeviceUuid, gi: int) -> None: ...

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None: ...

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None: ...


class Partitioner:
    def __init__(self, driver: MigDriver, *, step_s: float = STEP_S) -> None:
        self.driver = driver
        self.step_s = step_s

    async def partition(
        self,
        device: DeviceUuid,
        layout: MigLayout,
        profiles: Sequence[InstanceProfile],
        in_use: Collection[str],
    ) -> tuple[MigInstance, ...]:
        """Instances whose UUIDs are `in_use` stay.

        Raises InUseError while one blocks the layout, RequestError if the layout is impossible,
        UnavailableError if the driver fails.
        """
        before = await self._call(device, "list its instances", self.driver.instances(device))
        ids = {instance.gi for instance in before if instance.uuid in in_use}
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

    async def _apply(self, device: DeviceUuid, step: PlanStep) -> None:
        driver = self.driver
        match step:
            case DestroyInstance(instance):
                what = f"destroy {describe_instances([instance])}"
                for compute in instance.compute_ids:
                    await self._call(
                        device, what, driver.destroy_compute(device, instance.gi, compute)
                    )
                await self._call(device, what, driver.destroy_instance(device, instance.gi))
            case CompleteInstance(instance):
                what = f"complete {describe_instances([instance])}"
                await self._call(device, what, driver.create_compute(device, instance.gi))
            case CreateInstance(profile, start):
                what = f"create {profile.name} at slice {start}"
                gi = await self._call(
                    device, what, driver.create_instance(device, profile.id, start)
                )
                await self._call(device, what, driver.create_compute(device, gi))

    async def _call(self, device: DeviceUuid, what: str, call: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self.step_s):
                return await call
        except TimeoutError as error:
            raise UnavailableError(
                f"the driver did not {what} of device {device} within {self.step_s:g} s: check "
                "`nvidia-smi`, and the kernel log for Xid messages"
            ) from error
        except UnavailableError as error:
            raise UnavailableError(
                f"the driver did not {what} of device {device}: {error}"
            ) from error
