"""What a pod asks for, with every vendor's vocabulary removed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DeviceOrder(StrEnum):
    """Which of a node's fitting devices is taken first."""

    FIRST = "first"
    """Lowest index (gpushare)."""
    LAST = "last"
    """Highest index (Volcano vGPU without a policy)."""
    BINPACK = "binpack"
    """Most memory in use, then lowest index."""
    SPREAD = "spread"
    """Fewest shares, then lowest index."""


class NodeOrder(StrEnum):
    """Which of the fitting nodes is taken first."""

    BINPACK = "binpack"
    """The one whose devices are left with the least spare memory."""
    SPREAD = "spread"
    """The one whose devices are used least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """One container's request: `gpus` different devices of one node, the same share of each."""

    container: str
    gpus: int
    memory_units: int | None = None
    """Units of the node's `unit_mib`, per device; None: see `memory_percent`."""
    memory_percent: int | None = None
    """Percent of each device's memory; wins over `memory_units`; neither: all of it."""
    cores_percent: int = 0
    """Percent of each device's compute; 0 is neither limited nor reserved, 100 wants it alone."""
    whole: bool = False
    """The devices are held whole: idle before, closed to others after."""
    slotted: bool = True
    """The share takes one of the device's slots (the kubelet is told of slots, not of MiB)."""
    init: bool = False
    """An init container: it runs before the others and uses what they will use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSelection:
    """Which devices the pod's author allows. Empty collections and None do not constrain."""

    types: tuple[str, ...] = ()
    """The model must contain one of these, whatever the letter case."""
    not_types: tuple[str, ...] = ()
    """The model may contain none of these."""
    uuids: tuple[str, ...] = ()
    not_uuids: tuple[str, ...] = ()
    mode: str | None = None
    """Demanded `DeviceMode` of the whole node, exactly as written by the author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTerm:
    """One requirement on a node's labels (or, with `field`, on its name).

    `operator` is one of In, NotIn, Exists, DoesNotExist, Gt, Lt as in NodeSelectorRequirement.
    """

    key: str
    operator: str
    values: tuple[str, ...] = ()
    field: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A pod's toleration: Kubernetes' `Toleration` without the seconds."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDemands:
    """What the pod demands of its node besides devices. Equal demands share one cached answer."""

    selector: tuple[tuple[str, str], ...] = ()
    """`nodeSelector`, sorted by key."""
    required: tuple[tuple[NodeTerm, ...], ...] = ()
    """Terms of required node affinity: any one term, all of its requirements."""
    preferred: tuple[tuple[int, tuple[NodeTerm, ...]], ...] = ()
    """Weight 1-100 and term of preferred node affinity."""
    tolerations: tuple[Toleration, ...] = ()
    host_ports: tuple[str, ...] = ()
    """`protocol/port` of every hostPort."""
    unsupported: tuple[str, ...] = ()
    """Hard constraints of the pod that placing does not weigh; it is refused, naming them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRequest:
    """Everything placing needs to know of a pod."""

    dialect: str = ""
    """Key of `shared.dialects.DIALECTS`; empty for a pod that asks for no GPU."""
    containers: tuple[GpuRequest, ...] = ()
    """One entry per container that asks for a GPU, in spec order, init containers first."""
    same_device: bool = False
    """All containers share one device (gpushare)."""
    triggers: tuple[str, ...] = ()
    """Resources a node must serve through its device plugin, or Allocate would never be called."""
    selection: DeviceSelection = field(default_factory=DeviceSelection)
    tag: str = ""
    """Group whose pods must not meet on one device; empty: none."""
    device_order: DeviceOrder = DeviceOrder.LAST
    node_order: NodeOrder = NodeOrder.BINPACK
    resources: Mapping[str, int] = field(default_factory=dict)
    """Ordinary resources: `cpu` in thousandths, `memory` and `ephemeral-storage` in bytes, `pods`
    (always 1) and other extended resources in units."""
    demands: NodeDemands = field(default_factory=NodeDemands)
    priority: int = 0
