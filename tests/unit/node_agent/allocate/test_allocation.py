"""Allocation: what a container gets for its lease, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.node_agent.allocate.allocation import (
    NodeSnapshot,
    OtherDevicesError,
    grant,
    preferred_device_ids,
    refusal_text,
)
from services.node_agent.allocate.device_list_strategies import DeviceListStrategy
from services.node_agent.allocate.pod_resolution import ContainerCandidate
from services.node_agent.kubelet.pods import KubeletContainer
from services.node_agent.records.checkpoint_entry import Fence, slot_key
from shared.dialects.advertised import PluginDeviceId
from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.devices.device import Device, DeviceMode, Isolation
from shared.model.devices.enforcers import MissingEnforcer, Offer
from shared.model.errors import RequestError
from shared.model.leases.lease import Lease, LeaseState, MigPlacement, Share
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.request import SharingPolicy, Term
from tests.support.node_agent.agent import lease_of
from tests.support.node_agent.agent import share as node_share
from tests.support.node_agent.node import kubelet_pod
from tests.support.simcluster.kubelet import NODE

NUMBER = "volcano.sh/vgpu-number"
MEMORY = "volcano.sh/gpu-memory"
TRIGGER = "leasehold.dev/share"
A, B = DeviceUuid("GPU-aaaa"), DeviceUuid("GPU-bbbb")


def ids_of(*named: tuple[str, DeviceUuid | None]) -> dict[str, PluginDeviceId]:
    return {text: PluginDeviceId(id=text, healthy=True, device=device) for text, device in named}


NODE_FACTS = NodeSnapshot(
    name=NodeName(NODE),
    devices={
        uuid: Device(uuid=uuid, index=index, model="Tesla T4", memory_mib=15360, slots=4)
        for index, uuid in enumerate((A, B))
    },
    served={
        NUMBER: ids_of(*((f"{uuid}::{n}", uuid) for uuid in (A, B) for n in range(4))),
        MEMORY: ids_of(*((f"{i}-{n}", uuid) for i, uuid in enumerate((A, B)) for n in range(9))),
        TRIGGER: ids_of(*((f"share-{n}", None) for n in range(4))),
    },
    paths=Paths(library="/lib.so", preload="/preload", containers="/containers"),
)


def share(device: DeviceUuid = A, **changes: Any) -> Share:
    facts: dict[str, Any] = {
        "device": device,
        "memory_mib": 3000,
        "cores_percent": 50,
        "slot": 2,
        "fence": 7,
    }
    return node_share(0 if device == A else 1, **(facts | changes))


def lease(*shares: Share, **changes: Any) -> Lease:
    return lease_of("uid", *(shares or (share(),)), **changes)


PLACE = MigPlacement(layout="group1", position=0, profile="1g.5gb")


def units(device: DeviceUuid, memory_mib: int, **changes: Any) -> Lease:
    part = share(device, memory_mib=memory_mib, slotted=False, slot=None, **changes)
    return lease(part, dialect="volcano-gpushare")


def candidate(variable: str = "", *, prefix: str | None = None) -> ContainerCandidate:
    container = KubeletContainer(name="main", reserved_variable=variable, reserved_prefix=prefix)
    pod = kubelet_pod("pod", "uid", containers=(container,))
    return ContainerCandidate(pod=pod, container=container)


def granted(
    leased: Lease | None = None,
    *ids: str,
    resource: str = NUMBER,
    container: ContainerCandidate | None = None,
    reusable: tuple[str, ...] = (),
    node: NodeSnapshot = NODE_FACTS,
) -> ContainerSetup:
    return grant(
        leased or lease(),
        container or candidate(),
        node,
        resource=resource,
        device_ids=ids or (f"{A}::2",),
        reusable=reusable,
    ).setup


def test_35_a_container_gets_the_variables_and_mounts_of_its_lease() -> None:
    setup = granted()

    assert setup.environment["NVIDIA_VISIBLE_DEVICES"] == A
    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert setup.environment["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert [mount.container_path for mount in setup.mounts] == [
        "/usr/local/vgpu/libvgpu.so",
        "/tmp/vgpu",
        "/tmp/cudevshr.cache",
        "/tmp/vgpulock",
        "/overrideEnv",
        "/etc/ld.so.preload",
    ]


def test_a_container_knows_when_its_maximum_run_time_is_over() -> None:
    ending = structs.replace(lease(), term=Term(max_run_s=5400))

    assert granted(ending).environment["LEASEHOLD_ENDS_AT"] == "1970-01-01T01:30:00+00:00"


def changed(**changes: Any) -> NodeSnapshot:
    devices = {uuid: replace(each, **changes) for uuid, each in NODE_FACTS.devices.items()}
    return replace(NODE_FACTS, devices=devices)


def test_a_strict_node_grants_whole_gpus_only() -> None:
    strict = changed(isolation=Isolation.STRICT)

    assert granted(lease(share(sharing=SharingPolicy.EXCLUSIVE)), node=strict)
    with pytest.raises(RequestError, match="isolation of this node is strict"):
        granted(node=strict)


def test_a_lease_by_a_driver_that_limits_no_memory_any_more_is_refused_with_the_reason() -> None:
    """The driver may have been replaced by an older one since the pod was placed."""
    by_driver = lease(share(memory="driver", compute="none", mode="driver"))
    offer = Offer(memory=("driver", "hami-core"), compute=("hami-core",))

    assert granted(by_driver, node=changed(offer=offer)).environment
    old = changed(missing=(MissingEnforcer("driver", "it is older than R615"),))
    with pytest.raises(RequestError, match="does not now: it is older than R615"):
        granted(by_driver, node=old)


def test_a_part_of_a_device_in_mig_mode_is_refused() -> None:
    with pytest.raises(RequestError, match="in mig mode, and the lease is for a part of it"):
        granted(node=changed(mode=DeviceMode.MIG))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state": LeaseState.RELEASED}, "is released"),
        ({"state": LeaseState.RESERVED}, "is reserved"),
        ({"node": NodeName("other")}, "on node other"),
        ({"pod": PodUid("another")}, "of pod another"),
        ({"shares": (share(container="side"),)}, "no share for this container"),
        ({"shares": (share(memory_mib=0),)}, "0 MiB"),
        ({"shares": (share(DeviceUuid("GPU-cccc")),)}, "GPU-cccc, which is not on this node"),
        ({"dialect": "unknown"}, "requests GPUs as 'unknown'"),
        ({"shares": (share(mig=PLACE),)}, "in hami-core mode, and the lease is for an instance"),
    ],
)
def test_a_lease_that_is_not_valid_for_the_container_is_refused(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        granted(lease(**changes))


@pytest.mark.parametrize(
    ("leased", "ids", "resource", "text"),
    [
        (lease(), (f"{B}::0",), NUMBER, "chose 1 of GPU-bbbb, and the lease is for 1 of GPU"),
        (lease(), ("GPU-cccc-0",), NUMBER, "not one that this node serves"),
        (units(A, 3), ("0-0", "0-1"), MEMORY, "2 of GPU-aaaa, and the lease is for 3 of GPU-aaaa"),
    ],
)
def test_ids_other_than_the_leased_ones_are_refused(
    leased: Lease, ids: tuple[str, ...], resource: str, text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        granted(leased, *ids, resource=resource)


@pytest.mark.parametrize(
    ("gone", "changes", "text"),
    [
        (True, {}, "GPU 0 .* is missing on the node"),
        (False, {"healthy": False, "fault": "Xid 79"}, "GPU-aaaa gets no new share: Xid 79"),
        (False, {"mode": DeviceMode.MIG}, "in mig mode, and the lease is for a part of it"),
    ],
)
def test_what_is_wrong_with_the_device_is_the_reason_if_the_kubelet_could_choose_only_others(
    gone: bool, changes: dict[str, Any], text: str
) -> None:
    node = replace(changed(**changes), absent=frozenset({A} if gone else ()))

    with pytest.raises(RequestError, match=text) as refused:
        granted(lease(), f"{B}::0", node=node)

    assert not isinstance(refused.value, OtherDevicesError)


def test_ids_of_the_leased_device_and_reused_ones_are_accepted() -> None:
    assert granted(lease(), f"{A}::0") == granted()
    assert granted(lease(), f"{B}::0", reusable=(f"{B}::0",)) == granted()
    assert granted(units(A, 3), "0-0", "0-1", "0-2", resource=MEMORY)
    triggered = granted(units(A, 3000), "share-3", resource=TRIGGER)
    assert triggered.environment["NVIDIA_VISIBLE_DEVICES"] == "0"


def test_a_fence_older_than_the_last_honoured_one_is_refused() -> None:
    key = slot_key(share(), PodUid("uid"))

    def honoured(fence: int, pod: str) -> NodeSnapshot:
        return replace(NODE_FACTS, fences={key: Fence(fence=fence, pod=PodUid(pod))})

    with pytest.raises(RequestError, match=r"is outdated: pod .* was given the same share"):
        granted(node=honoured(8, "later"))
    assert granted(node=honoured(6, "earlier"))
    assert granted(node=honoured(8, "uid")), "containers of one pod"


def test_a_pod_that_sets_a_reserved_variable_is_refused() -> None:
    with pytest.raises(RequestError, match="container main of pod default/pod sets LD_PRELOAD"):
        granted(container=candidate("LD_PRELOAD"))


def test_a_source_that_could_select_devices_later_is_refused() -> None:
    with pytest.raises(RequestError, match="takes variables by envFrom"):
        granted(container=candidate(prefix=""))


def test_a_source_is_harmless_by_its_prefix_or_where_cdi_passes_the_devices() -> None:
    by_cdi = replace(NODE_FACTS, device_list_strategies=(DeviceListStrategy.CDI_CRI,))

    assert granted(container=candidate())
    assert granted(container=candidate(prefix=""), node=by_cdi)


def chosen(leased: Lease, resource: str, size: int, **changes: Any) -> list[str]:
    ids = NODE_FACTS.served[resource]
    facts: dict[str, Any] = {"available": list(ids), "must_include": []}
    return preferred_device_ids(
        leased, candidate(), NODE_FACTS, resource=resource, size=size, **(facts | changes)
    )


BOTH = lease(share(A), share(B, slot=3))
UNITS = units(B, 3)


@pytest.mark.parametrize(
    ("leased", "resource", "free", "ids"),
    [
        pytest.param(lease(), NUMBER, {}, [f"{A}::2"], id="the leased slot"),
        pytest.param(BOTH, NUMBER, {}, [f"{A}::2", f"{B}::3"], id="of each device"),
        pytest.param(
            lease(),
            NUMBER,
            {"available": [f"{B}::0", f"{A}::3"]},
            [f"{A}::3"],
            id="in use: another",
        ),
        pytest.param(lease(), NUMBER, {"available": [f"{B}::0"]}, [], id="none is free"),
        pytest.param(
            BOTH, NUMBER, {"must_include": [f"{A}::0"]}, [f"{A}::0", f"{B}::3"], id="must include"
        ),
        pytest.param(UNITS, MEMORY, {}, ["1-0", "1-1", "1-2"], id="units of memory"),
    ],
)
def test_ids_of_the_leased_devices_are_preferred(
    leased: Lease, resource: str, free: dict[str, Any], ids: list[str]
) -> None:
    assert chosen(leased, resource, len(ids) or 1, **free) == ids


def test_a_refusal_names_node_resource_and_ids() -> None:
    text = refusal_text("no", NodeName(NODE), MEMORY, [f"0-{n:x}" for n in range(5)])

    assert text == (
        "Leasehold refuses 5 of volcano.sh/gpu-memory on node node-0 (0-0, 0-1, 0-2 and 2 more): no"
    )


@given(st.data())
def test_21_preferred_ids_are_available_and_of_the_requested_number(data: st.DataObject) -> None:
    ids = list(NODE_FACTS.served[NUMBER])
    available = data.draw(st.lists(st.sampled_from(ids), unique=True))
    size = data.draw(st.integers(1, 3))
    must = data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=size))
    devices = data.draw(st.lists(st.sampled_from([A, B]), min_size=size, max_size=size))
    leased = lease(*(share(device, slot=n) for n, device in enumerate(devices)))

    found = chosen(leased, NUMBER, size, available=available, must_include=must)

    assert not found or len(found) == size
    assert not found or set(must) <= set(found) <= {*available, *must}
