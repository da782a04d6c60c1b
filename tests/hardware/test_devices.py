"""What the node agent reads of NVML is what the driver's own program shows."""

import csv
import re

import pytest

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.support.gpu_driver import MIB

QUERY = "uuid,index,name,memory.total,driver_version,mig.mode.current,pci.bus_id"


def test_the_agent_and_nvidia_smi_describe_the_gpu_alike(machine: Machine, seen: Add) -> None:
    listed = machine.run(smi(machine), "-L")
    shown = re.findall(r"^GPU \d+: (.+) \(UUID: (GPU-[^)]+)\)$", listed, re.MULTILINE)

    ours = (machine.gpu.model, machine.gpu.uuid)
    seen("model and UUID", " ".join(ours), "those of `nvidia-smi -L`", holds=ours in shown)


def test_every_field_of_the_gpu(real: Machine, seen: Add) -> None:
    text = real.run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    rows = [
        dict(zip(QUERY.split(","), row, strict=True))
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
    ]
    shown = next(row for row in rows if row["uuid"] == real.gpu.uuid)
    gpu = real.gpu

    enabled = {True: "Enabled", False: "Disabled"}
    ours = {
        "index": str(gpu.index),
        "name": gpu.model,
        "memory.total": str(gpu.memory_mib),
        "driver_version": gpu.driver,
        "mig.mode.current": enabled[gpu.mig.enabled] if gpu.mig else "[N/A]",
        "pci.bus_id": gpu.bus.upper(),
    }
    shown["pci.bus_id"] = shown["pci.bus_id"][-len(ours["pci.bus_id"]) :]
    differ = [
        f"{name}: {own}, not {shown[name]}" for name, own in ours.items() if shown[name] != own
    ]
    figure = "; ".join(differ) or f"{len(ours)} of {len(ours)}: " + ", ".join(ours.values())
    seen("fields that are those of nvidia-smi", figure, "all", holds=not differ)


def test_processes_and_their_memory(machine: Machine, pods: AddPod, seen: Add) -> None:
    pod = pods("devices", mib=4096)
    load = pod.load()
    assert load.fits("1g")

    used = {p.pid: p.memory_bytes for p in machine.sample().processes}

    ours = pod.pids & used.keys()
    seen("processes of a pod that NVML lists", len(ours), 1)
    counted = pod.counted().total // MIB
    by_driver = sum(used[pid] or 0 for pid in ours) // MIB
    figure = f"{counted}, {by_driver}"
    close = abs(counted - by_driver) <= 64
    seen("MiB of the pod: counted in it, by NVML", figure, "within 64", holds=close)
    seen("MiB that a context takes", pod.counted().context // MIB)
    if machine.real:
        query = "--query-compute-apps=pid,used_memory"
        listed = machine.run("nvidia-smi", query, "--format=csv,noheader,nounits")
        shown = [[int(word) for word in line.split(",")] for line in listed.splitlines()]
        theirs = [[pid, by_driver] for pid in ours]
        seen("the same process in nvidia-smi", theirs, shown, holds=all(x in shown for x in theirs))


def smi(machine: Machine) -> str:
    """Return `nvidia-smi` of this driver."""
    return "nvidia-smi" if machine.real else str(machine.folder / "nvidia-smi")


@pytest.mark.parametrize("way", ["nvidia-smi", "CUDA"])
def test_a_pod_sees_its_limit(machine: Machine, pods: AddPod, seen: Add, way: str) -> None:
    pod = pods("sees", mib=5120)

    if way == "CUDA":
        total = pod.load().value("info", "total") // MIB
    else:
        query = ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        text = pod.run(smi(machine), *(query if machine.real else ()))
        total = int(re.findall(r"(\d+)(?:MiB \||$)", text.strip(), re.MULTILINE)[-1])

    seen(f"MiB of a pod of 5120 MiB by {way}", total, 5120)
