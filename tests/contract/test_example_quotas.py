"""The examples for Kueue and KServe agree with what Leasehold publishes and understands.

Kueue's rules: https://kueue.sigs.k8s.io/docs/concepts/dynamic_resource_allocation/
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

import pytest
import yaml

from services.cli.__main__ import main
from services.node_agent.dra.slices import ClaimableNode, build_slices
from services.node_agent.mig.gpu_models import A100_80
from services.node_agent.mig.layouts import derive_layouts
from shared.model.devices.device import Device, DeviceMode
from shared.model.leases.lease import MIB
from shared.model.names import NodeName
from shared.model.quantity import parse_quantity
from shared.model.requests.claim import DRIVER
from shared.model.requests.request import LEAST_SHARE_MIB
from tests.contract.test_monitoring import existing, metrics_in
from tests.support.build import device
from tools.generate.pages import ROOT

EXAMPLES = ROOT / "examples"
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CLASSES = ROOT / "k8s" / "components" / "dra" / "device-classes.yaml"
GPU_MIB = 81_920
GPU = device(memory_mib=GPU_MIB)
MIG_GPU = replace(GPU, mode=DeviceMode.MIG, layouts=derive_layouts(A100_80))

Json = dict[str, Any]


@cache
def documents(file: str) -> dict[str, Json]:
    """Return the objects of an example by their kind."""
    text = (EXAMPLES / file).read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@cache
def mappings() -> dict[str, Json]:
    """Return Kueue's mapping of each DeviceClass, as the page has it."""
    [block] = YAML_BLOCK.findall((EXAMPLES / "README.md").read_text())
    listed = yaml.safe_load(block)["resources"]["deviceClassMappings"]
    return {name: mapping for mapping in listed for name in mapping["deviceClassNames"]}


def devices(*gpus: Device) -> list[Json]:
    node = ClaimableNode(name=NodeName("a"), uid="1", devices=gpus, leases=())
    [written] = build_slices(node, generation=1)
    listed: list[Json] = written["spec"]["devices"]
    return listed


def charge(wanted: str | None, listed: list[Json]) -> int:
    """Return the MiB that Kueue counts for a claim: the most of those of each device."""
    [source] = mappings()["gpu.leasehold.dev"]["sources"]
    name = source["capacity"]["name"]
    return max(amount for gpu in listed for amount in rounded(wanted, gpu["capacity"][name]))


def rounded(wanted: str | None, capacity: Json) -> Iterator[int]:
    """Yield a request in MiB as a device's policy rounds it; nothing if it has no such size."""
    policy = capacity["requestPolicy"]
    size = parse_quantity(wanted or policy["default"]) / MIB
    if "validValues" in policy:
        sizes = [parse_quantity(value) / MIB for value in policy["validValues"]]
        yield from (int(value) for value in sizes if value >= size)
        return
    least, step = (parse_quantity(policy["validRange"][name]) / MIB for name in ("min", "step"))
    yield int(least + max(0, ceil((size - least) / step)) * step)


def test_every_device_class_is_counted() -> None:
    classes = {document["metadata"]["name"] for document in yaml.safe_load_all(CLASSES.read_text())}

    assert mappings().keys() == classes


def test_kueue_reads_the_slices_of_our_driver() -> None:
    [source] = mappings()["gpu.leasehold.dev"]["sources"]

    assert source["capacity"]["driver"] == DRIVER
    assert all(source["capacity"]["name"] in gpu["capacity"] for gpu in devices(GPU, MIG_GPU))


@pytest.mark.parametrize(
    ("wanted", "mib"),
    [("20Gi", 20_480), ("1Mi", LEAST_SHARE_MIB), ("20000M", 19_074), (None, GPU_MIB)],
)
def test_kueue_counts_what_a_claim_of_a_share_gets(wanted: str | None, mib: int) -> None:
    assert charge(wanted, devices(GPU)) == mib


def test_kueue_counts_an_instance_by_its_profile_and_by_capacity_the_largest() -> None:
    listed = devices(MIG_GPU)
    sizes = {gpu["attributes"]["profile"]["string"]: charge(None, [gpu]) for gpu in listed}

    assert sizes == {
        gpu["attributes"]["profile"]["string"]: gpu["attributes"]["memoryMiB"]["int"]
        for gpu in listed
    }
    assert charge("8Gi", listed) == max(sizes.values())


def test_the_job_is_queued_where_the_memory_of_its_claim_is_counted() -> None:
    objects = documents("kueue-claims.yaml")
    queue, local, template, job = (
        objects[kind] for kind in ("ClusterQueue", "LocalQueue", "ResourceClaimTemplate", "Job")
    )
    [group] = queue["spec"]["resourceGroups"]
    [request] = template["spec"]["spec"]["devices"]["requests"]
    [use] = job["spec"]["template"]["spec"]["resourceClaims"]
    quotas = {
        resource["name"]: resource["nominalQuota"] for resource in group["flavors"][0]["resources"]
    }
    name = mappings()[request["exactly"]["deviceClassName"]]["name"]

    assert set(group["coveredResources"]) == {entry["name"] for entry in mappings().values()}
    assert quotas.keys() == set(group["coveredResources"])
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert use["resourceClaimTemplateName"] == template["metadata"]["name"]
    memory = request["exactly"]["capacity"]["requests"]["memory"]
    assert charge(memory, devices(GPU)) * 3 * MIB <= parse_quantity(quotas[name])


def test_the_inference_service_is_understood_and_scales_by_metrics_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = documents("inference-kserve.yaml")["InferenceService"]
    [metric] = service["spec"]["predictor"]["autoScaling"]["metrics"]

    with pytest.raises(SystemExit) as left:
        main(["explain", "--request", str(EXAMPLES / "inference-kserve.yaml"), "--json"])
    [pod] = json.loads(capsys.readouterr().out)["pods"]

    assert left.value.code == 0
    assert [device["memory_mib"] for device in pod["containers"][0]["devices"]] == [12_000]
    assert metrics_in(metric["external"]["metric"]["query"]) <= existing()
