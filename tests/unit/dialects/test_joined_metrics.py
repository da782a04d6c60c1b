"""Series of schedulers and of node monitors, and annotations, are joined by their labels."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from services.api.projection.lease_views import device_view
from services.api.projection.page_views import NodeView
from shared.dialects.metrics import (
    DeviceAllocation,
    DeviceUsage,
    InstanceUsage,
    MemoryUsage,
    PublishedMetric,
    ShareAllocation,
    ShareUsage,
)
from shared.dialects.nvidia import metrics as hami
from shared.dialects.nvidia.annotations import encode_register
from shared.dialects.volcano import metrics as volcano
from shared.model.devices.device import DeviceUse
from shared.model.names import NodeName
from tests.support import build

UUID = "GPU-2b6e2590-e838-592e-8c6f-15b806d1d114"
MODELS = ("NVIDIA A100-SXM4-40GB", "Tesla T4", "GRID V100D-8Q")


def allocation(model: str) -> DeviceAllocation:
    used = DeviceUse(memory_mib=1000, cores_percent=30, shares=1)
    device = build.device(UUID, 3, model=model, memory_mib=40960)
    return DeviceAllocation.from_attributes(
        device_view(NodeView(node=NodeName("n1")), device, used, excluded="", shares=())
    )


def usage(model: str) -> DeviceUsage:
    return DeviceUsage(
        node="n1",
        uuid=UUID,
        index=3,
        model=model,
        used_bytes=5,
        busy_percent=1,
        memory_busy_percent=2,
    )


def share(model: str) -> ShareAllocation:
    held = build.share(UUID, 3, memory_mib=1000, cores_percent=30)
    lease = build.lease("u", "n1", held, namespace="team", name="p")
    return ShareAllocation(device=allocation(model), lease=lease, held=held)


SHARE_USAGE = ShareUsage(
    namespace="team",
    pod="p",
    container="main",
    position=0,
    device_uuid=UUID,
    limit_bytes=1,
    memory=MemoryUsage(total=1, context=0, module=0, buffer=1, offset=0, sm_percent=2),
    since_kernel_s=1.0,
    instance=InstanceUsage(
        uuid="MIG-1", profile="1g.5gb", gpu_instance_id=1, compute_instance_id=0
    ),
)
NEW_KEY, OLD_KEY = {"node", "device_uuid", "device_type"}, {"nodeid", "deviceuuid"}


def labels(metrics: Sequence[PublishedMetric], subject: Any) -> dict[str, dict[str, str]]:
    return {metric.name: dict(metric.labels(subject)) for metric in metrics}


def agree(groups: Iterable[dict[str, str]], *, but: frozenset[str] = frozenset()) -> None:
    """Assert that labels of one name have one value."""
    values: dict[str, str] = {}
    for group in groups:
        for name, value in group.items():
            if name not in but:
                assert values.setdefault(name, value) == value, name


@pytest.mark.parametrize("model", MODELS)
def test_series_of_a_device_are_joined_by_every_label_that_they_share(model: str) -> None:
    scheduler = labels(hami.SCHEDULER_DEVICES, allocation(model))
    monitor = labels(hami.MONITOR_DEVICES, usage(model))
    monitor |= labels(volcano.MONITOR_DEVICES, usage(model))

    agree((*scheduler.values(), *monitor.values()))
    assert all(set(each) >= NEW_KEY or set(each) >= OLD_KEY for each in scheduler.values())
    assert all(set(each) >= NEW_KEY or set(each) >= OLD_KEY for each in monitor.values())
    assert (
        len({frozenset(each) for each in labels(hami.MONITOR_DEVICES, usage(model)).values()}) == 1
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_type_in_the_nodes_annotation_is_that_of_the_metrics(model: str) -> None:
    (record,) = json.loads(encode_register([build.device(UUID, model=model)]))

    (new,) = {each["device_type"] for each in labels(hami.MONITOR_DEVICES, usage(model)).values()}
    (old,) = {each["devicetype"] for each in labels(volcano.MONITOR_DEVICES, usage(model)).values()}
    assert record["type"] == new == old
    assert record["type"].count("NVIDIA") == 1


def test_series_of_a_container_are_joined_by_every_label_that_they_share() -> None:
    scheduler = labels(hami.SCHEDULER_CONTAINERS, share(MODELS[0]))
    monitor = labels(hami.MONITOR_SHARES, SHARE_USAGE) | labels(volcano.MONITOR_SHARES, SHARE_USAGE)

    agree((*scheduler.values(), *monitor.values()))
    for key in ({"namespace", "pod", "device_uuid"}, {"podnamespace", "podname", "deviceuuid"}):
        assert any(key <= set(each) for each in scheduler.values())
        assert any(key <= set(each) for each in monitor.values())


def test_series_of_volcanos_scheduler_are_joined_with_each_other() -> None:
    devices = labels(volcano.SCHEDULER_DEVICES, allocation(MODELS[0]))
    pods = labels(volcano.SCHEDULER_PODS, share(MODELS[0]))

    agree((*devices.values(), *pods.values()))
    assert all({"devID", "NodeName"} <= set(each) for each in (*devices.values(), *pods.values()))
