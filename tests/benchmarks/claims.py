"""ResourceClaims on a real API server: `python -m tests.benchmarks.claims --help`.

The cluster's own kube-scheduler allocates claims on nodes without kubelets, whose ResourceSlices
are written here in several forms, one after the other, to show what each part of them costs:

    plain       whole GPUs, as NVIDIA's driver lists them: the control
    shared      GPUs of which claims request MiB and cores, as Leasehold's agents list them
    profiles    GPUs in MIG mode, one device for each profile, as Leasehold's agents list them, of
                which claims request MiB; the next two differ in what claims request
    classes     a DeviceClass for each profile
    selectors   one DeviceClass, and the profile by a selector of the claim
    sizes       GPUs in MIG mode, one device for each GPU, whose memory has the profiles' sizes
    counters    the MIG instances that a GPU can have, each with the memory slices that it consumes
    leasehold   as `shared`, with the binding conditions of agents: Leasehold has to run, with the
                webhook for claims and the right of the scheduler to write its answers

The claims exist before their pods, so that no other controller counts. Claims for MIG instances
request three profiles in turn. Latency runs from before the request that creates a pod until a
watch shows its node.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path

from services.node_agent.dra.slices import ClaimableNode, build_slices
from services.node_agent.mig.gpu_models import A100_80
from services.node_agent.mig.layouts import derive_layouts
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.model.devices.device import Device, DeviceMode
from shared.model.names import DeviceUuid, NodeName
from shared.model.requests.claim import DRIVER
from tests.benchmarks.pace import quantile
from tests.benchmarks.processes import cpu_ms
from tests.benchmarks.real_apiserver import LABEL, NAMESPACES, NODES, SMALL, RealApi, each
from tests.benchmarks.scenarios import load, named_pid
from tests.benchmarks.systems import GPU_MIB, MODEL, SYSTEMS

API = "/apis/resource.k8s.io/v1"
CLASS = "benchmark-claims"
SYSTEM = dataclasses.replace(SYSTEMS["leasehold"], scheduler="default-scheduler")
GUARD = ("bindsToNode", "bindingConditions", "bindingFailureConditions")
LAYOUTS = derive_layouts(A100_80)
SIZES = {p.name: f"{p.memory_mib}Mi" for layout in LAYOUTS for p in layout.profiles}
REQUESTED = ("1g.10gb", "2g.20gb", "3g.40gb")
"""Profiles of claims for MIG instances."""
AS_LISTED = ("profiles", "classes", "selectors")
FORMS = ("plain", "shared", *AS_LISTED, "sizes", "counters", "leasehold")
MIG_FORMS = {*AS_LISTED, "sizes", "counters"}
SHARE = {"memory": "3000Mi", "cores": "10"}


def driver_of(form):
    """Return the driver's name: the webhook denies what is not leased of Leasehold's."""
    return DRIVER if form == "leasehold" else "gpu.example.com"


def plain(uuid, number):
    texts = {"type": "gpu", "uuid": uuid, "productName": MODEL, "brand": "Nvidia"}
    texts |= {"architecture": "Ampere", "resource.kubernetes.io/pcieRoot": f"pci0000:{number:02x}"}
    versions = {"cudaComputeCapability": "8.0.0", "driverVersion": "580.65.6"}
    versions["cudaDriverVersion"] = "13.0.0"
    attributes = {name: {"string": text} for name, text in texts.items()}
    attributes |= {name: {"version": text} for name, text in versions.items()}
    capacity = {"memory": {"value": f"{GPU_MIB}Mi"}}
    return {"name": f"gpu-{number}", "attributes": attributes, "capacity": capacity}


def instances(uuid, number):
    """Return one device for each place of an instance."""
    for profile in A100_80:
        for start in profile.starts:
            device = plain(uuid, number)
            device["name"] += f"-mig-{profile.id}-{start}"
            device["attributes"] |= {
                "type": {"string": "mig"},
                "profile": {"string": profile.name},
            }
            taken = {
                f"memory-slice-{position}": {"value": "1"}
                for position in range(start, start + profile.memory_slices)
            }
            device["consumesCounters"] = [{"counterSet": f"gpu-{number}", "counters": taken}]
            yield device


def sized(uuid, number):
    """Return a GPU of which claims request memory, in the sizes of its profiles."""
    device = plain(uuid, number)
    device["attributes"]["type"] = {"string": "mig"}
    sizes = sorted(SIZES.values(), key=lambda size: int(size.removesuffix("Mi")))
    policy = {"default": sizes[0], "validValues": sizes}
    device["capacity"] = {"memory": {"value": f"{GPU_MIB}Mi", "requestPolicy": policy}}
    return device | {"allowMultipleAllocations": True}


def devices(form, node, uuids):
    """Return the devices of a node's slice, as Leasehold's agents list them."""
    about = {"model": MODEL, "memory_mib": GPU_MIB, "slots": 10}
    if form in AS_LISTED:
        about |= {"mode": DeviceMode.MIG, "layouts": LAYOUTS}
    gpus = tuple(
        Device(uuid=DeviceUuid(uuid), index=number, pcie=f"pci0000:{number:02x}", **about)
        for number, uuid in enumerate(uuids)
    )
    claimable = ClaimableNode(
        name=NodeName(node), uid="", devices=gpus, leases=(), driver_version="580.65.06"
    )
    listed = [
        device
        for made in build_slices(claimable, generation=1)
        for device in made["spec"]["devices"]
    ]
    if form != "leasehold":
        for device in listed:
            for field in GUARD:
                del device[field]
    return listed


def slices(form, node, uid, gpus):
    """Return the ResourceSlices of a node, as in `form`."""
    uuids = [f"GPU-{node}-{number}" for number in range(gpus)]
    numbered = list(enumerate(uuids))
    sets = []
    if form == "plain":
        listed = [plain(uuid, number) for number, uuid in numbered]
    elif form == "sizes":
        listed = [sized(uuid, number) for number, uuid in numbered]
    elif form == "counters":
        listed = [instance for n, uuid in numbered for instance in instances(uuid, n)]
        memory = {f"memory-slice-{number}": {"value": "1"} for number in range(8)}
        sets = [{"name": f"gpu-{number}", "counters": memory} for number in range(gpus)]
    else:
        listed = devices(form, node, uuids)
    parts = [
        *({"devices": listed[start : start + 64]} for start in range(0, len(listed), 64)),
        *({"sharedCounters": sets[start : start + 8]} for start in range(0, len(sets), 8)),
    ]
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
    pool = {"name": node, "generation": 1, "resourceSliceCount": len(parts)}
    about = {"driver": driver_of(form), "nodeName": node, "pool": pool}
    for number, part in enumerate(parts):
        name = f"{node}-{driver_of(form)}-{number}"
        metadata = {"name": name, "labels": {LABEL: ""}, "ownerReferences": [owner]}
        yield {"metadata": metadata, "spec": about | part}


def request(form, number):
    """Return what the claim with this number requests."""
    exactly = {"deviceClassName": f"{CLASS}-{form}"}
    profile = REQUESTED[number % len(REQUESTED)]
    if form in {"shared", "leasehold"}:
        exactly["capacity"] = {"requests": SHARE}
    elif form in {"profiles", "sizes"}:
        exactly["capacity"] = {"requests": {"memory": SIZES[profile]}}
    elif form == "classes":
        exactly["deviceClassName"] += f"-{profile}"
    elif form in MIG_FORMS:
        expression = f"device.attributes['{driver_of(form)}'].profile == '{profile}'"
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    return {"name": "gpu", "exactly": exactly}


def device_classes(form):
    """Return the DeviceClass of a form, or that of each profile."""
    attributes = f"device.attributes['{driver_of(form)}']"
    kind = "mig" if form in MIG_FORMS else "gpu"
    text = f"device.driver == '{driver_of(form)}' && {attributes}.type == '{kind}'"
    texts = {f"{CLASS}-{form}": text}
    if form == "classes":
        texts = {
            f"{CLASS}-{form}-{profile}": f"{text} && {attributes}.profile == '{profile}'"
            for profile in REQUESTED
        }
    for name, expression in texts.items():
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        yield {"metadata": {"name": name, "labels": {LABEL: ""}}, "spec": spec}


async def measure(api, form, options, turn):
    """Create slices, claims and pods; return a row of the table."""
    nodes = list(api.nodes)

    async def create_slices(node):
        uid = (await api.kube.read(f"{NODES}/{node}", dict))["metadata"]["uid"]
        for made in slices(form, node, uid, options.gpus):
            await api.kube.create(f"{API}/resourceslices", made)

    await each(nodes, create_slices)
    for device_class in device_classes(form):
        with contextlib.suppress(KubernetesConflictError):
            await api.kube.create(f"{API}/deviceclasses", device_class)
    names = [f"{form}-{turn}-{number}" for number in range(options.pods)]
    claims = f"{API}/namespaces/{api.namespace}/resourceclaims"

    async def create_claim(name):
        requests = [request(form, int(name.rpartition("-")[2]))]
        spec = {"devices": {"requests": requests}}
        await api.kube.create(claims, {"metadata": {"name": name}, "spec": spec})

    await each(names, create_claim)
    await asyncio.sleep(options.settle)
    sent = {}

    async def create_pod(name):
        pod = api.pod(name, 1, {})
        pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": name}]
        limits = {"limits": SMALL, "requests": SMALL, "claims": [{"name": "gpu"}]}
        pod["spec"]["containers"][0]["resources"] = limits
        sent[name] = time.perf_counter()
        await api.kube.create(f"{NAMESPACES}/{api.namespace}/pods", pod)

    pids = dict(options.process)
    before = cpu_ms(pids)
    began = time.perf_counter()
    await each(names, create_pod)
    bound = await api.wait_bound(names, options.limit)
    used = sum(cpu_ms(pids).values()) - sum(before.values())
    lasted = max((api.bound[name] for name in bound), default=began) - began
    ms = [1e3 * (api.bound[name] - sent[name]) for name in bound]
    await api.delete(names)
    for name in names:
        with contextlib.suppress(NotFoundError):
            await api.kube.delete(f"{claims}/{name}")
    for kind in ("resourceslices", "deviceclasses"):
        await api.kube.delete(f"{API}/{kind}?labelSelector={LABEL}")
    return (
        f"| {form} | {len(nodes)} x {options.gpus} | {len(bound)} of {len(names)} | "
        f"{len(bound) / max(lasted, 1e-9):.1f} | {quantile(ms, 0.5):g} / {quantile(ms, 0.99):g} | "
        f"{used / len(names):.1f} |"
    )


async def benchmark(options):
    print("| slices | nodes x GPUs | bound | pods/s | p50 / p99, ms | CPU per pod, ms |")
    print("|---|---|---|---|---|---|", flush=True)
    for count in options.nodes:
        async with RealApi.connect(options.kubeconfig, SYSTEM) as api:
            await api.create_nodes(count, options.gpus)
            for turn, form in enumerate(options.slices):
                print(await measure(api, form, options, turn), flush=True)
    print(f"load at the end: {load()}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kubeconfig", type=Path, required=True)
    add("--slices", nargs="+", choices=FORMS, default=FORMS[:-1], help="default: all but the last")
    add("--process", type=named_pid, action="append", default=[], metavar="NAME=PID")
    add("--nodes", type=int, nargs="+", default=[500], help="default: 500")
    add("--gpus", type=int, default=1, help="GPUs of each node (default 1)")
    add("--pods", type=int, default=200, help="created at once, for each form (default 200)")
    add("--settle", type=float, default=5, help="seconds before the pods come (default 5)")
    add("--limit", type=float, default=300, help="most seconds to wait for the pods (default 300)")
    asyncio.run(benchmark(parser.parse_args()))


if __name__ == "__main__":
    main()
