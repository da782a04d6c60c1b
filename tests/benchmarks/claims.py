"""ResourceClaims on a real API server: `python -m tests.benchmarks.claims --help`.

The cluster's own kube-scheduler allocates claims on nodes without kubelets, whose ResourceSlices
are written here in several forms, one after the other, to show what each part of them costs:

    plain       whole GPUs, as NVIDIA's driver lists them: the control
    shared      GPUs of which claims request MiB and cores, as Leasehold's agents list them
    counters    the MIG instances that a GPU can have, each with the memory slices that it consumes
    leasehold   as `shared`, with the binding conditions of agents: Leasehold has to run, with the
                webhook for claims and the right of the scheduler to write its answers

The claims exist before their pods, so that no other controller counts. Latency runs from before the
request that creates a pod until a watch shows its node.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path

from services.node_agent.dra.slices import ClaimableNode, build_slices
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.model.devices.device import Device
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
MIG_PLACES = {1: range(7), 2: (0, 2, 4), 4: (0, 4), 8: (0,)}
"""Where instances of an A100 may start, by their memory slices."""
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
    for slices, starts in MIG_PLACES.items():
        for start in starts:
            device = plain(uuid, number)
            device["name"] += f"-mig-{slices}-{start}"
            device["attributes"]["type"] = {"string": "mig"}
            taken = {
                f"memory-slice-{position}": {"value": "1"}
                for position in range(start, start + slices)
            }
            device["consumesCounters"] = [{"counterSet": f"gpu-{number}", "counters": taken}]
            yield device


def slices(form, node, uid, gpus):
    """Return the ResourceSlices of a node, as in `form`."""
    uuids = [f"GPU-{node}-{number}" for number in range(gpus)]
    about = {"model": MODEL, "memory_mib": GPU_MIB, "slots": 10}
    mixed = tuple(
        Device(uuid=DeviceUuid(uuid), index=number, pcie=f"pci0000:{number:02x}", **about)
        for number, uuid in enumerate(uuids)
    )
    claimable = ClaimableNode(
        name=NodeName(node), uid=uid, devices=mixed, leases=(), driver_version="580.65.06"
    )
    [made] = build_slices(claimable, generation=1)
    made["metadata"]["labels"] = {LABEL: ""}
    spec = made["spec"]
    described = [made]
    spec["driver"] = driver_of(form)
    if form == "shared":
        for device in spec["devices"]:
            for field in GUARD:
                del device[field]
    if form == "plain":
        spec["devices"] = [plain(uuid, number) for number, uuid in enumerate(uuids)]
    if form == "counters":
        spec["devices"] = [
            instance for n, uuid in enumerate(uuids) for instance in instances(uuid, n)
        ]
        spec["pool"]["resourceSliceCount"] = 2
        memory = {f"memory-slice-{number}": {"value": "1"} for number in range(8)}
        sets = [{"name": f"gpu-{number}", "counters": memory} for number in range(gpus)]
        rest = {key: value for key, value in spec.items() if key != "devices"}
        metadata = made["metadata"] | {"name": f"{made['metadata']['name']}-counters"}
        described.append(made | {"metadata": metadata, "spec": rest | {"sharedCounters": sets}})
    return described


async def measure(api, form, options, turn):
    """Create slices, claims and pods; return a row of the table."""
    nodes = list(api.nodes)

    async def create_slices(node):
        uid = (await api.kube.read(f"{NODES}/{node}", dict))["metadata"]["uid"]
        for made in slices(form, node, uid, options.gpus):
            await api.kube.create(f"{API}/resourceslices", made)

    await each(nodes, create_slices)
    kind = "mig" if form == "counters" else "gpu"
    driver = driver_of(form)
    text = f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'"
    device_class = {
        "metadata": {"name": f"{CLASS}-{form}", "labels": {LABEL: ""}},
        "spec": {"selectors": [{"cel": {"expression": text}}]},
    }
    with contextlib.suppress(KubernetesConflictError):
        await api.kube.create(f"{API}/deviceclasses", device_class)
    exactly = {"deviceClassName": f"{CLASS}-{form}"}
    if form in {"shared", "leasehold"}:
        exactly["capacity"] = {"requests": SHARE}
    names = [f"{form}-{turn}-{number}" for number in range(options.pods)]
    claims = f"{API}/namespaces/{api.namespace}/resourceclaims"

    async def create_claim(name):
        devices = {"requests": [{"name": "gpu", "exactly": exactly}]}
        await api.kube.create(claims, {"metadata": {"name": name}, "spec": {"devices": devices}})

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
    forms = ["plain", "shared", "counters", "leasehold"]
    add("--slices", nargs="+", choices=forms, default=forms[:3], help="default: all but the last")
    add("--process", type=named_pid, action="append", default=[], metavar="NAME=PID")
    add("--nodes", type=int, nargs="+", default=[500], help="default: 500")
    add("--gpus", type=int, default=1, help="GPUs of each node (default 1)")
    add("--pods", type=int, default=200, help="created at once, for each form (default 200)")
    add("--settle", type=float, default=5, help="seconds before the pods come (default 5)")
    add("--limit", type=float, default=300, help="most seconds to wait for the pods (default 300)")
    asyncio.run(benchmark(parser.parse_args()))


if __name__ == "__main__":
    main()
