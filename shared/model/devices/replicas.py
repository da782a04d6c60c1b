"""GPUs that are offered as equal replicas, as NVIDIA's device plugin offers them; pure."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from shared.model.bounds import KeyText
from shared.model.denial import Denial
from shared.model.devices.enforcers import Holding, Offer, SharingMode
from shared.model.requests.request import ALL_PERCENT, GpuRequest, SharingPolicy

LEAST_REPLICAS = 2
MOST_REPLICAS = 4096
MIB = 1 << 20
Strategy = Literal["time-slicing", "mps"]
_MODES: dict[Strategy, SharingMode] = {"time-slicing": "time-slicing", "mps": "mps-replicas"}


class Replicas(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How a device is divided into replicas, of which pods request a number and no amounts.

    By MPS their parts of memory and cores are held, by time-slicing not.
    """

    number: Annotated[int, Meta(ge=LEAST_REPLICAS, le=MOST_REPLICAS)]
    strategy: Strategy
    resource: KeyText
    one_per_container: bool = False

    @property
    def mode(self) -> SharingMode:
        return _MODES[self.strategy]

    @property
    def cores_percent(self) -> int:
        return ALL_PERCENT // self.number

    def memory_mib(self, device_mib: int) -> int:
        return device_mib // self.number

    def holding(self, offer: Offer, mode: SharingMode | Literal[""]) -> Holding | None:
        if mode not in ("", self.mode):
            return None
        if self.strategy == "time-slicing":
            return Holding("none", "none", self.mode)
        is_offered = "mps" in offer.memory and "mps" in offer.compute
        return Holding("mps", "mps", self.mode) if is_offered else None

    def refusal(self, request: GpuRequest) -> Denial | None:
        """Return why no replica is for a request, whatever is free."""
        if request.number_of != self.resource:
            text = (
                f"it is offered as {self.number} replicas by {self.strategy}, for pods that "
                f"request a number of {self.resource} and no amounts"
            )
            return Denial("GpuReplicasOnly", text)
        if self.one_per_container and request.gpus > 1:
            text = (
                f"a container may have one of its replicas, and {request.gpus} are requested "
                "(failRequestsGreaterThanOne)"
            )
            return Denial("GpuReplicasTogether", text)
        return None

    def request_of(self, request: GpuRequest, device_mib: int) -> GpuRequest:
        return structs.replace(
            request,
            whole=False,
            sharing=SharingPolicy.SHARED,
            slotted=True,
            slots=0,
            memory_units=None,
            memory_percent=None,
            memory_bytes=self.memory_mib(device_mib) * MIB,
            cores_percent=self.cores_percent,
        )


def is_replica(mode: SharingMode) -> bool:
    return mode in _MODES.values()
