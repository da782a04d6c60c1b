"""What holds shares of a device, and how a device is shared; pure."""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, get_args

from msgspec import Meta, Struct

from shared.model.bounds import LongText

MemoryEnforcer = Literal["exclusive", "mig", "driver", "mps", "mps-shared", "hami-core", "none"]
ComputeEnforcer = Literal["exclusive", "mig", "mps", "mps-shared", "time", "hami-core", "none"]
SharingMode = Literal[
    "exclusive",
    "mig",
    "driver",
    "mps",
    "mps-shared",
    "time",
    "hami-core",
    "none",
    "time-slicing",
    "mps-replicas",
]
"""All leases of a device have one mode until the last ends: processes under different compute
enforcers would take each other's turns."""
Enforcer = MemoryEnforcer | ComputeEnforcer

MEMORY_ENFORCERS: tuple[MemoryEnforcer, ...] = get_args(MemoryEnforcer)
COMPUTE_ENFORCERS: tuple[ComputeEnforcer, ...] = get_args(ComputeEnforcer)
LABELS: dict[Enforcer, str] = {
    "exclusive": "exclusive use",
    "mig": "MIG",
    "driver": "the driver",
    "mps": "MPS",
    "mps-shared": "a shared server of MPS",
    "time": "GPU time",
    "hami-core": "HAMi-core",
    "none": "nothing",
}
MEMORY_BY_DEFAULT: tuple[MemoryEnforcer, ...] = ("driver", "hami-core")
"""In order of preference, for pods that demand none. Others need a pod's demand."""
MPS: Mapping[MemoryEnforcer, ComputeEnforcer] = {"mps": "mps", "mps-shared": "mps-shared"}
"""By a server of the container, or of the GPU."""
BESIDE_MPS: Mapping[ComputeEnforcer, tuple[MemoryEnforcer, ...]] = {
    compute: ("driver", memory) for memory, compute in MPS.items()
}
"""In order of preference: MPS and HAMi-core would limit each other."""
COMPUTE_BY_DEFAULT: tuple[ComputeEnforcer, ...] = ("hami-core",)
JOINED: tuple[SharingMode, ...] = ("driver", "hami-core", "none")
"""A share may run beside others although nothing holds it."""


class Holding(NamedTuple):
    """What holds a share, and the mode that its device has meanwhile."""

    memory: MemoryEnforcer
    compute: ComputeEnforcer
    mode: SharingMode


UNHELD = Holding("none", "none", "none")
WHOLE = Holding("exclusive", "exclusive", "exclusive")
INSTANCE = Holding("mig", "mig", "mig")


def held_text(memory: MemoryEnforcer, compute: ComputeEnforcer, *, capped: bool) -> str:
    """Return what holds a share; `capped` if it has less than all of the cores.

    >>> held_text("driver", "none", capped=True)
    'memory by the driver, cores not held'
    >>> held_text("hami-core", "hami-core", capped=False)
    'memory by HAMi-core, cores not limited'
    """
    if memory == compute == "exclusive":
        return "no other pod on the GPU"
    by_memory = "not held" if memory == "none" else f"by {LABELS[memory]}"
    by_compute = "not held" if compute == "none" else f"by {LABELS[compute]}"
    is_capped = capped or compute == "mig"
    return f"memory {by_memory}, cores {by_compute if is_capped else 'not limited'}"


class MissingEnforcer(Struct, frozen=True, gc=False):
    """An enforcer that a device does not offer, and why."""

    name: Enforcer
    reason: LongText


class HeldBy(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The enforcers that a pod demands; None for any that Leasehold uses without a demand."""

    memory: MemoryEnforcer | None = None
    compute: ComputeEnforcer | None = None

    @property
    def by_shared_server(self) -> bool:
        return "mps-shared" in (self.memory, self.compute)

    def __str__(self) -> str:
        words = {"memory": self.memory, "compute": self.compute}
        return ",".join(f"{what}={word}" for what, word in words.items() if word is not None)


NO_DEMAND = HeldBy()


class Offer(Struct, frozen=True, kw_only=True, gc=False):
    """What a device offers to hold parts of it."""

    memory: Annotated[tuple[MemoryEnforcer, ...], Meta(max_length=len(MEMORY_ENFORCERS))]
    compute: Annotated[tuple[ComputeEnforcer, ...], Meta(max_length=len(COMPUTE_ENFORCERS))]

    def holding(
        self, demand: HeldBy, *, mode: SharingMode | Literal[""], capped: bool, limited: bool = True
    ) -> Holding | None:
        """Return what would hold a part of the device, or None if nothing does as demanded.

        `mode` is empty while no lease is on the device. Without a demand memory must be held, and
        cores if the share is `capped`; nothing if it is not `limited`.
        """
        if not limited and demand == NO_DEMAND:
            demand = HeldBy(memory="none", compute="none")
        by_default = MEMORY_BY_DEFAULT
        if demand.compute is not None:
            by_default = BESIDE_MPS.get(demand.compute, by_default)
        for memory in by_default if demand.memory is None else (demand.memory,):
            if memory != "none" and memory not in self.memory:
                continue
            compute = self._compute(memory, demand.compute, capped=capped)
            if compute is None:
                continue
            own = self._mode_of(memory, compute, mode)
            if mode in ("", own):
                return Holding(memory, compute, own)
        return None

    def _compute(
        self, memory: MemoryEnforcer, demanded: ComputeEnforcer | None, *, capped: bool
    ) -> ComputeEnforcer | None:
        of_memory = MPS.get(memory)
        demanded = demanded or of_memory
        if demanded is not None:
            is_there = demanded == "none" or demanded in self.compute
            return demanded if is_there and of_memory in (None, demanded) else None
        offered = next((word for word in COMPUTE_BY_DEFAULT if word in self.compute), None)
        return offered if offered is not None or capped else "none"

    def _mode_of(
        self, memory: MemoryEnforcer, compute: ComputeEnforcer, mode: SharingMode | Literal[""]
    ) -> SharingMode:
        if compute in ("mps", "mps-shared", "time"):
            return compute
        if memory == "hami-core" and mode == "driver":
            return mode  # HAMi-core holds cores in both modes, so neither takes the other's turns
        if memory != "none":
            return memory
        if compute != "none":
            return compute
        if mode in JOINED:
            return mode
        return next((word for word in MEMORY_BY_DEFAULT if word in self.memory), "none")


HAMI_CORE_ALONE = Offer(memory=("hami-core",), compute=("hami-core",))
NOTHING_OFFERED = Offer(memory=(), compute=())
