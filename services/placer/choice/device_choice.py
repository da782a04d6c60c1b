"""Which devices of one node a pod gets, container by container, in the order its author chose.

All devices of a pod are of one mode: shares that HAMi-core holds to, or MIG instances. Where both
will do, `PodRequest.instances_first` says which are tried first.
"""

from collections.abc import Callable, Iterable, Sequence

from services.placer.choice.chosen_shares import Pick
from services.placer.choice.device_order import NOTHING, NOTHING_OWN, Own, Owns, in_order
from services.placer.choice.device_topology import best_set, matters, place_in
from services.placer.mirror.node_mirror import DeviceState, NodeState
from shared.model.device import (
    IDLE_BEFORE,
    DeviceMode,
    isolation_allows,
    required_cores_percent,
    required_memory_mib,
)
from shared.model.request import DeviceOrder, GpuRequest, PodRequest, SharingPolicy, TopologyScope
from shared.placing.device_filters import device_excluded, is_selective
from shared.placing.mig_instances import find_instance, instance_mib, largest_first

Finder = Callable[[GpuRequest, PodRequest, Sequence[DeviceState], Owns], list[Pick] | None]
"""Returns a device for every share of one container, or None if too few can take one."""


def choose_devices(request: PodRequest, node: NodeState) -> list[Pick] | None:
    """Return a device for every share of the pod, or None if the node has too little.

    Two shares of one container never meet on a device; two containers may. Init containers run
    before the others, so what they use is free again for them.
    """
    if not request.containers:
        return []
    selection = request.selection
    devices: Sequence[DeviceState] = node.devices
    if is_selective(selection):
        devices = [d for d in devices if device_excluded(selection, d.device) is None]
    modes = modes_of(request)
    if not node.mig and DeviceMode.HAMI_CORE in modes:
        return _chosen(request, devices, chosen_for)
    for mode in modes:
        picks = _chosen(request, of_mode(devices, mode), FINDERS[mode])
        if picks is not None:
            return picks
    return None


Chooser = Callable[[NodeState], list[Pick] | None]


def chooser_of(request: PodRequest) -> Chooser:
    """Return `choose_devices` for one request and many nodes.

    What most pods ask for, units of memory and perhaps cores of the first or last devices that
    have them, is looked for directly; it comes to the same.
    """
    if not _is_simple(request):
        return lambda node: choose_devices(request, node)
    [container] = request.containers
    gpus, units, room = container.gpus, container.memory_units or 0, room_for(container)
    slotted, last = container.slotted, request.device_order is DeviceOrder.LAST
    matched = gpus > 1 and request.prefer_links

    def choose(node: NodeState) -> list[Pick] | None:
        if node.mig or node.guarded or (matched and node.linked):
            return choose_devices(request, node)
        chosen = list[Pick]()
        for device in reversed(node.devices) if last else node.devices:
            if (
                device.free_units >= units
                and (device.slotted_room if slotted else device.room) >= room
            ):
                chosen.append((container, device, units * device.unit, None))
                if len(chosen) == gpus:
                    return chosen
        return None

    return choose


def _is_simple(request: PodRequest) -> bool:
    if len(request.containers) != 1:
        return False
    [container] = request.containers
    return (
        request.device_order in _BY_INDEX
        and not request.anti_affinity_groups
        and request.topology_scope is TopologyScope.NODE
        and not is_selective(request.selection)
        and bool(container.memory_units)
        and container.memory_percent is None
        and container.memory_bytes is None
        and not container.slots
        and container.sharing not in IDLE_BEFORE
        and not container.strict
    )


_BY_INDEX = (DeviceOrder.LAST, DeviceOrder.FIRST)


def modes_of(request: PodRequest) -> tuple[DeviceMode, ...]:
    """Return the modes of devices that will do, in the order in which they are tried."""
    if not takes_instances(request):
        return _SHARES_ONLY
    if any(
        each.strict and each.sharing is not SharingPolicy.EXCLUSIVE for each in request.containers
    ):
        return _INSTANCES_ONLY
    return _INSTANCES_FIRST if request.prefer_mig else _SHARES_FIRST


def takes_instances(request: PodRequest) -> bool:
    """Say whether MIG instances will do: for every container, and none wants devices whole."""
    return bool(request.containers) and all(
        container.mig_allowed and not container.whole for container in request.containers
    )


def of_mode(devices: Sequence[DeviceState], mode: DeviceMode) -> list[DeviceState]:
    """Return those devices that are in a mode."""
    instances = mode is DeviceMode.MIG
    return [device for device in devices if device.mig is instances]


_SHARES_ONLY = (DeviceMode.HAMI_CORE,)
_INSTANCES_ONLY = (DeviceMode.MIG,)
_SHARES_FIRST = (DeviceMode.HAMI_CORE, DeviceMode.MIG)
_INSTANCES_FIRST = (DeviceMode.MIG, DeviceMode.HAMI_CORE)


def _chosen(
    request: PodRequest, devices: Sequence[DeviceState], finder: Finder
) -> list[Pick] | None:
    if len(request.containers) == 1:
        return finder(request.containers[0], request, devices, NOTHING_OWN)
    if not request.same_device:
        return _for_all(request, devices, finder)
    for device in in_order(request, devices, NOTHING_OWN):
        picks = _for_all(request, (device,), finder)
        if picks is not None:
            return picks
    return None


def _for_all(
    request: PodRequest, devices: Sequence[DeviceState], finder: Finder
) -> list[Pick] | None:
    """Serve the containers as they come; of instances, where that fails, the largest need first.

    For the first instance decides on the layout, and one for little may leave none for much.
    """
    containers = request.containers
    picks = _in_turn(containers, request, devices, finder)
    if picks is None and finder is instances_for:
        picks = _in_turn(largest_first(containers), request, devices, finder)
        if picks is not None:
            picks.sort(key=lambda pick: containers.index(pick[0]))
    return picks


def _in_turn(
    containers: Iterable[GpuRequest],
    request: PodRequest,
    devices: Sequence[DeviceState],
    finder: Finder,
) -> list[Pick] | None:
    picks: list[Pick] = []
    owns: dict[DeviceState, Own] = {}
    for container in containers:
        chosen = finder(container, request, devices, owns)
        if chosen is None:
            return None
        picks += chosen
        note_given(chosen, owns)
    return picks


def chosen_for(
    container: GpuRequest, request: PodRequest, devices: Sequence[DeviceState], owns: Owns
) -> list[Pick] | None:
    """Find devices whose shares HAMi-core holds to."""
    wanted = container.gpus
    if wanted > len(devices):
        return None
    tags, room, idle = (
        request.anti_affinity_groups,
        room_for(container),
        container.sharing in IDLE_BEFORE,
    )
    slotted, slots, chosen = container.slotted, container.slots, list[Pick]()
    strict = container.strict
    seen = NOTHING_OWN if container.init else owns
    if owns or request.topology_scope is not TopologyScope.NODE:
        devices = _in_question(request, devices, owns)
    enough = len(devices) if wanted > 1 and matters(container, request, devices) else wanted
    for device in in_order(request, devices, owns):
        # What the pod's own containers took is looked at only where the rest would fit.
        if (device.slotted_room if slotted and not slots else device.room) < room:
            continue
        memory = share_mib(container, device)
        if (
            device.memory + memory <= device.total
            and not (idle and device.shares)
            and not (tags and not device.tags.isdisjoint(tags))
            and not (slots and slotted and device.shares >= slots)
            and (not (strict or device.guarded) or isolation_allows(container, device.device))
            and (not seen or _fits_beside(container, device, memory, seen.get(device)))
        ):
            chosen.append((container, device, memory, None))
            if len(chosen) == enough:
                break
    if wanted > 1:
        return _together(container, request, chosen)
    return chosen or None


def instances_for(
    container: GpuRequest, request: PodRequest, devices: Sequence[DeviceState], owns: Owns
) -> list[Pick] | None:
    """Find MIG instances. They have cores of their own, and nobody meets anybody in one."""
    wanted, tags, chosen = container.gpus, request.anti_affinity_groups, list[Pick]()
    devices = _in_question(request, devices, owns)
    enough = len(devices) if matters(container, request, devices) else wanted
    for device in in_order(request, devices, owns):
        need = instance_mib(container, device.device, device.largest)
        if not device.instance or device.instance < need or not device.tags.isdisjoint(tags):
            continue
        layout, taken, free = held_of(device, container, owns)
        found = find_instance(device.tables, layout, taken, need_mib=need, free_mib=free)
        if found is not None:
            chosen.append((container, device, found[1], found[0]))
            if len(chosen) == enough:
                break
    return _together(container, request, chosen)


FINDERS = {DeviceMode.HAMI_CORE: chosen_for, DeviceMode.MIG: instances_for}


def held_of(device: DeviceState, container: GpuRequest, owns: Owns) -> tuple[str, int, int]:
    """Return, for a container, the layout that is pinned, the positions taken and the MiB free.

    What the pod's own containers have counts too. Init containers may have the same instances as
    the others, whom they do not meet, but there is one layout for all.
    """
    own, free = owns.get(device, NOTHING), device.total - device.memory
    layout = device.layout or own.layout
    if container.init:
        return layout, device.positions, free
    return layout, device.positions | own.positions, free - own.memory


def _in_question(
    request: PodRequest, devices: Sequence[DeviceState], owns: Owns
) -> Sequence[DeviceState]:
    """Leave out devices that the pod has already, or that lie nobody knows where."""
    if request.distinct_devices and owns:
        devices = [device for device in devices if not owns.get(device, NOTHING).shares]
    if request.topology_scope is not TopologyScope.NODE:
        devices = [
            device for device in devices if place_in(device, request.topology_scope) is not None
        ]
    return devices


def _together(container: GpuRequest, request: PodRequest, fitting: list[Pick]) -> list[Pick] | None:
    """Of the devices that fit, in the order they were tried, take those that go best together."""
    wanted = container.gpus
    if len(fitting) < wanted:
        return None
    chosen = fitting[:wanted]
    if wanted > 1 and matters(container, request, [fitting[0][1]]):
        places = best_set(request, [pick[1] for pick in fitting], wanted)
        if places is None:
            return None
        chosen = [fitting[place] for place in places]
    if container.whole:
        chosen.sort(key=lambda pick: pick[1].index)
    return chosen


def _fits_beside(container: GpuRequest, device: DeviceState, memory: int, own: Own | None) -> bool:
    if own is None:
        return True
    return (
        not own.alone
        and device.memory + own.memory + memory <= device.total
        and device.cores + own.cores + room_for(container) <= 100
        and not (container.sharing in IDLE_BEFORE and own.shares)
        and (
            not container.slotted or device.shares + own.shares < (container.slots or device.slots)
        )
    )


def note_given(chosen: Sequence[Pick], owns: dict[DeviceState, Own]) -> None:
    """Add to what the pod's containers were given so far; of init containers, a layout is left."""
    for container, device, memory, place in chosen:
        if container.init and place is None:
            continue
        own = owns.setdefault(device, Own())
        if place is not None:
            own.layout = place.layout
        if container.init:
            continue
        own.memory += memory
        own.shares += 1
        if place is not None:
            own.positions |= 1 << place.position
        else:
            own.cores += required_cores_percent(container)
            own.alone |= container.sharing is SharingPolicy.EXCLUSIVE


def room_for(container: GpuRequest) -> int:
    """Return the percent of a device's cores that must be unreserved for a share to come.

    One without cores still does not join where all of them are reserved, unless it may.
    """
    if container.whole:
        return 100
    return container.cores_percent or int(container.sharing is not SharingPolicy.BEST_EFFORT)


def share_mib(container: GpuRequest, device: DeviceState) -> int:
    """Return what a share takes of the device: `shared.model.device.needed_mib` on the mirror."""
    units = container.memory_units
    if units is None or container.memory_percent is not None or container.memory_bytes is not None:
        return required_memory_mib(container, device.device)
    return device.everything if container.whole else units * device.unit
