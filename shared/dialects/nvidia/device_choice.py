"""HAMi's annotations and policies for the choice of nodes and devices; pure.

Policies are those of HAMi's scheduler. In a chain such as `numa,binpack`, the first of `binpack`
and `spread` orders devices by how much of them is in use; `topology-aware` and `numa` prefer
devices with good links (for one GPU, `topology-aware` avoids them); `mutex` requires idle devices.
Any other policy is refused; upstream ignores it.
"""

from collections.abc import Mapping

from shared.dialects.dialect import Rules, list_entries
from shared.dialects.strict_values import check_choice, parse_boolean, parse_decimal
from shared.model.device import DeviceMode
from shared.model.errors import RequestError
from shared.model.request import DeviceOrder, DeviceSelection, NodeOrder, PodRequest, TopologyScope

USE_TYPES = "nvidia.com/use-gputype"
NOT_TYPES = "nvidia.com/nouse-gputype"
USE_UUIDS = "nvidia.com/use-gpuuuid"
NOT_UUIDS = "nvidia.com/nouse-gpuuuid"
NUMA_BIND = "nvidia.com/numa-bind"
MODE = "nvidia.com/vgpu-mode"
NODE_POLICY = "hami.io/node-scheduler-policy"
GPU_POLICY = "hami.io/gpu-scheduler-policy"
WEIGHTS = "hami.io/device-scoring-weights"
ANNOTATIONS = frozenset(
    {
        *(USE_TYPES, NOT_TYPES, USE_UUIDS, NOT_UUIDS, NUMA_BIND, MODE),
        *(NODE_POLICY, GPU_POLICY, WEIGHTS),
    }
)

MUTEX, NUMA, TOPOLOGY = "mutex", "numa", "topology-aware"
ORDERS: Mapping[str, DeviceOrder] = {
    "binpack": DeviceOrder.MOST_ALLOCATED,
    "spread": DeviceOrder.LEAST_ALLOCATED,
}
NODE_ORDERS: Mapping[str, NodeOrder] = {order.value: order for order in NodeOrder}
POLICIES = (*ORDERS, NUMA, MUTEX, TOPOLOGY)
PARTS = ("slot", "core", "memory")


def parse_device_choice(
    annotations: Mapping[str, str], rules: Rules, *, gpus: int
) -> tuple[PodRequest, bool]:
    """Return a request with the choices only, and whether devices must be idle.

    The operator's policies are the defaults. `gpus` is the largest number that a container
    requests. Raises RequestError naming annotation and value.
    """
    chain = _chain(GPU_POLICY, annotations.get(GPU_POLICY, ""))
    default = _chain("--gpu-scheduler-policy", rules.gpu_scheduler_policy)
    policies = chain or default
    node_policy = annotations.get(NODE_POLICY, "").strip() or rules.node_scheduler_policy
    check_choice(NODE_POLICY, node_policy, NODE_ORDERS)
    node_order = NODE_ORDERS[node_policy]
    orders = [ORDERS[policy] for policy in (*chain, *default, "spread") if policy in ORDERS]
    if node_order is NodeOrder.FRAGMENTATION and ORDERS.keys().isdisjoint(chain):
        orders = [DeviceOrder.BINPACK]
    numa = parse_boolean(NUMA_BIND, annotations.get(NUMA_BIND, ""))
    request = PodRequest(
        selection=_selection(annotations),
        node_order=node_order,
        device_order=DeviceOrder.LEAST_LINKED if TOPOLOGY in policies and gpus == 1 else orders[0],
        allocation_weights=_weights(annotations.get(WEIGHTS, "")),
        topology_scope=TopologyScope.NUMA if numa else TopologyScope.NODE,
        prefer_links=TOPOLOGY in policies or NUMA in policies,
    )
    return request, MUTEX in policies


def check_policies(rules: Rules) -> None:
    """Raise RequestError naming the watcher's flag whose value is not a policy."""
    check_choice("--node-scheduler-policy", rules.node_scheduler_policy, NODE_ORDERS)
    _chain("--gpu-scheduler-policy", rules.gpu_scheduler_policy)


def _chain(name: str, text: str) -> tuple[str, ...]:
    policies = list_entries(text)
    for policy in policies:
        check_choice(name, policy, POLICIES)
    return policies


def _selection(annotations: Mapping[str, str]) -> DeviceSelection:
    """Parse what is allowed and what is denied; what is both is denied."""
    return DeviceSelection(
        types=list_entries(annotations.get(USE_TYPES, "")),
        not_types=list_entries(annotations.get(NOT_TYPES, "")),
        uuids=list_entries(annotations.get(USE_UUIDS, "")),
        not_uuids=list_entries(annotations.get(NOT_UUIDS, "")),
        mode=_mode(annotations.get(MODE, "")),
    )


def _mode(text: str) -> str | None:
    modes = set(list_entries(text))
    for mode in sorted(modes):
        check_choice(MODE, mode, tuple(DeviceMode))
    return modes.pop() if len(modes) == 1 else None


def _weights(text: str) -> tuple[int, int, int]:
    """Parse `slot=1,core=1,memory=3`. The default weight is 1; only the ratio counts."""
    weights = dict.fromkeys(PARTS, 1.0)
    for entry in list_entries(text):
        part, _, amount = (piece.strip() for piece in entry.partition("="))
        if part not in weights:
            raise RequestError(f"{WEIGHTS} must look like slot=1,core=1,memory=3, got {entry!r}")
        weights[part] = parse_decimal(f"{WEIGHTS}: {part}", amount, most=1000)
    scale = 1 if all(weight.is_integer() for weight in weights.values()) else 1000
    slot, core, memory = (round(weights[part] * scale) for part in PARTS)
    return slot, core, memory
