"""A handler of the kubelet's device-plugin calls that accepts what it is not told to refuse."""

from collections.abc import Sequence

from shared.dialects.dialect import ContainerSetup
from shared.model.errors import RequestError


class FakeHandler:
    """Accepts every device ID but `bad`."""

    def __init__(self) -> None:
        self.preferences: list[tuple[str, int]] = []

    async def get_preferred_allocation(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        self.preferences.append((resource, len(available)))
        return list(available)[:size]

    async def allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        if "bad" in device_ids:
            raise RequestError("Leasehold refuses: a reason")
        names = {f"V{number}": "x" for number in range(20)}
        return ContainerSetup(environment=names)

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        if "bad" in device_ids:
            raise RequestError("not allocated")
