"""What a node advertises for its devices."""

import pytest

from proto.deviceplugin import api_pb2
from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of
from services.node_agent.kubelet.device_plugin import encode_list
from services.node_agent.views.advertisement import (
    MAX_LIST_BYTES,
    advertisement_of,
    check_list,
    list_size_bytes,
)
from shared.dialects import DIALECTS
from shared.dialects.advertised import PluginDeviceId, Strategy
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid
from tests.support.node_agent.agent import healthy_counts

MEMORY = "volcano.sh/gpu-memory"
GPUS = tuple(
    Gpu(uuid=DeviceUuid(f"GPU-{n}"), index=n, model="NVIDIA GeForce GTX 1080 Ti", memory_mib=11178)
    for n in range(8)
)


def test_the_node_is_annotated_and_a_resource_has_the_amounts_that_pods_request_beside_it() -> None:
    shown = advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.AUTO)

    assert shown.annotations["leasehold.dev/agent"] == "true"
    assert shown.amounts["leasehold.dev/share"] == {MEMORY, "volcano.sh/gpu-number"}


def test_17_too_many_units_are_refused_with_the_factor_needed() -> None:
    with pytest.raises(RequestError, match=r"--memory-factor 45 or more"):
        advertisement_of(DIALECTS.values(), devices_of(GPUS, SharingConfig()), Strategy.SHARE)

    devices = devices_of(GPUS, SharingConfig(unit_mib=45))
    shown = advertisement_of(DIALECTS.values(), devices, Strategy.SHARE)
    assert healthy_counts(shown)[MEMORY] == 8 * 248


def test_the_size_of_a_list_is_computed_exactly() -> None:
    ids = [PluginDeviceId(id=f"GPU-{n}-{n}", healthy=n % 2 == 0) for n in range(50)]

    encoded = encode_list({entry.id: entry for entry in ids})
    read = api_pb2.ListAndWatchResponse.FromString(encoded)

    assert list_size_bytes(ids) == len(encoded)
    assert [(device.ID, device.health == "Healthy") for device in read.devices] == [
        (entry.id, entry.healthy) for entry in ids
    ]


def test_no_list_and_no_id_is_longer_than_the_kubelet_accepts() -> None:
    ids = tuple(PluginDeviceId(id=f"{n:060d}", healthy=True) for n in range(MAX_LIST_BYTES // 60))

    with pytest.raises(RequestError, match="4000000"):
        check_list(MEMORY, ids)
    with pytest.raises(RequestError, match="64 characters"):
        check_list(MEMORY, [PluginDeviceId(id="x" * 64, healthy=True)])
