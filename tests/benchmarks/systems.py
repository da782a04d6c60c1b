# mypy: disable-error-code="type-arg"
"""How each scheduler learns of the GPUs of nodes without kubelets, and how a pod requests them.

Everything that `scenarios` knows of a system is in this table; another one needs an entry only.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GPU_MIB = 81_920
SHARE_MIB = 2_000
SHARE_PERCENT = 10
MODEL = "NVIDIA A100-SXM4-80GB"


@dataclass(frozen=True, kw_only=True)
class System:
    """One scheduler, as it is installed by default."""

    scheduler: str
    """`schedulerName` of its pods."""
    node: Callable[[str, int], tuple[dict, dict, dict]]
    """Labels, annotations and allocatable resources of a node with so many GPUs."""
    share: tuple[Mapping, Mapping]
    """Resources and annotations of a pod with 2,000 MiB and 10 % of a GPU."""
    whole: Callable[[int], tuple[Mapping, Mapping]]
    """The same of a pod with so many whole GPUs."""
    pod: tuple[Mapping, Mapping] = ({}, {})
    """Labels and annotations of every pod."""
    gang: Callable[[str, str, int, str], tuple[Sequence, dict]] | None = None
    """By namespace, name, size, and name of a PriorityClass or an empty text: objects to create, as
    (path, object), and more of each pod."""
    objects: Sequence[tuple[str, Mapping]] = ()
    """Created before all, as (path, object)."""
    heartbeat: Callable[[], Mapping] | None = None
    """Annotations of a node that its device plugin writes again and again."""
    started: Mapping[str, Mapping[str, str | None]] = dataclasses.field(default_factory=dict)
    """Annotations that its device plugin writes when a pod starts, of the `node` and the `pod`."""
    reserving: tuple[str, str] | None = None
    """Namespace of the pods by which it reserves GPUs, and the annotation in which each writes the
    UUID of its GPU."""
    allocated: str = ""
    """The pod annotation `UUID,TYPE,MIB,PERCENT:...` with the GPUs that a pod got, if there is."""


def _uuids(node, gpus):
    return [f"GPU-{node}-{number}" for number in range(gpus)]


def _volcano_node(name, gpus):
    rows = (f"{uuid},10,{GPU_MIB},{MODEL},true,hami-core:" for uuid in _uuids(name, gpus))
    amounts = {"number": 10 * gpus, "memory": GPU_MIB * gpus, "cores": 100 * gpus}
    resources = {f"volcano.sh/vgpu-{key}": str(amount) for key, amount in amounts.items()}
    return {}, {"volcano.sh/node-vgpu-register": "".join(rows), **_volcano_handshake()}, resources


def _volcano_handshake():
    return {"volcano.sh/node-vgpu-handshake": time.strftime("Reported %Y.%m.%d %H:%M:%S")}


def _volcano(count, memory, percent):
    amounts = {"number": count, "memory": memory, "cores": percent}
    return {f"volcano.sh/vgpu-{key}": str(amount) for key, amount in amounts.items()}, {}


def _volcano_gang(namespace, name, size, priority):
    group = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup"}
    spec = {"minMember": size, "priorityClassName": priority}
    group |= {"metadata": {"name": name}, "spec": spec}
    path = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{namespace}/podgroups"
    return [(path, group)], {"annotations": {"scheduling.k8s.io/group-name": name}}


def _leasehold_gang(_namespace, name, size, _priority):
    gang = "gang.scheduling.koordinator.sh"
    return [], {"annotations": {f"{gang}/name": name, f"{gang}/min-available": str(size)}}


def _hami_node(name, gpus):
    about = {"count": 10, "devmem": GPU_MIB, "devcore": 100, "type": MODEL, "numa": 0}
    devices = [{"id": uuid, **about, "health": True} for uuid in _uuids(name, gpus)]
    notes = {"hami.io/node-nvidia-register": json.dumps(devices), **_hami_handshake()}
    return {"gpu": "on"}, notes, {"nvidia.com/gpu": str(10 * gpus)}


def _hami_handshake():
    return {"hami.io/node-handshake": time.strftime("Reported %Y.%m.%d %H:%M:%S")}


def _hami(count, memory, percent):
    amounts = {"gpu": count, "gpumem": memory, "gpucores": percent}
    return {f"nvidia.com/{key}": str(amount) for key, amount in amounts.items()}, {}


def _kai_node(_name, gpus):
    about = {"nvidia.com/gpu.count": str(gpus), "nvidia.com/gpu.memory": str(GPU_MIB)}
    return about, {}, {"nvidia.com/gpu": str(gpus)}


_KAI_ADMITTED = {"runai/shared-gpu-configmap": "shares"}
"""What its admission webhook writes into pods with a share."""


def _kai_queue(name, more):
    unlimited = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
    resources = dict.fromkeys(("cpu", "gpu", "memory"), unlimited)
    queue = {"apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": name}}
    path = "/apis/scheduling.run.ai/v2/queues"
    return path, queue | {"spec": {"resources": resources} | more}


def _kai_gang(namespace, name, size, priority):
    group = {"apiVersion": "scheduling.run.ai/v2alpha2", "kind": "PodGroup"}
    spec = {"minMember": size, "queue": "scenarios", "priorityClassName": priority}
    path = f"/apis/scheduling.run.ai/v2alpha2/namespaces/{namespace}/podgroups"
    made = group | {"metadata": {"name": name}, "spec": spec}
    return [(path, made)], {"annotations": {"pod-group-name": name}}


def _percent(percent):
    return {"example.com/gpu-percent": str(percent)}


SYSTEMS = {
    "leasehold": System(
        scheduler="leasehold",
        node=_volcano_node,
        share=_volcano(1, SHARE_MIB, SHARE_PERCENT),
        whole=lambda count: _volcano(count, GPU_MIB, 100),
        gang=_leasehold_gang,
        allocated="volcano.sh/vgpu-ids-new",
    ),
    "kube-scheduler": System(  # places by the total of a node, without GPUs
        scheduler="default-scheduler",
        node=lambda _name, gpus: ({}, {}, _percent(100 * gpus)),
        share=(_percent(SHARE_PERCENT), {}),
        whole=lambda count: (_percent(100 * count), {}),
    ),
    "volcano": System(
        scheduler="volcano",
        node=_volcano_node,
        share=_volcano(1, SHARE_MIB, SHARE_PERCENT),
        whole=lambda count: _volcano(count, GPU_MIB, 100),
        gang=_volcano_gang,
        heartbeat=_volcano_handshake,
        allocated="volcano.sh/vgpu-ids-new",
    ),
    "kai": System(
        scheduler="kai-scheduler",
        node=_kai_node,
        share=({}, {"gpu-fraction": str(SHARE_PERCENT / 100), **_KAI_ADMITTED}),
        whole=lambda count: ({"nvidia.com/gpu": str(count)}, {}),
        pod=({"kai.scheduler/queue": "scenarios"}, {}),
        gang=_kai_gang,
        reserving=("kai-resource-reservation", "run.ai/reserve_for_gpu_index"),
        objects=(
            _kai_queue("scenarios-parent", {}),
            _kai_queue("scenarios", {"parentQueue": "scenarios-parent"}),
        ),
    ),
    "hami": System(
        scheduler="hami-scheduler",
        node=_hami_node,
        share=_hami(1, SHARE_MIB, SHARE_PERCENT),
        whole=lambda count: _hami(count, GPU_MIB, 100),
        heartbeat=_hami_handshake,
        started={
            "node": {"hami.io/mutex.lock": None},
            "pod": {"hami.io/bind-phase": "success"},
        },
        allocated="hami.io/vgpu-devices-allocated",
    ),
}
