"""`leasehold up --gpus local`: pods as processes of this machine, with a simulated driver.

MPS is on: the control daemon is a simulated one, too.
"""

import json
import os
import shlex
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli.state_dir import StateDir
from services.cli.up.down import leftovers
from services.node_agent.mps.control import PROGRAM
from simcluster.gpu_driver.build import build, compiler
from simcluster.gpu_driver.mps_control import command
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.hami_core import LIBRARIES
from tests.support.stack import LEASEHOLD, Stack, gpu_pod, run, running, stack, succeeded
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="simulated GPUs' driver needs a C compiler"),
]
GPU = gpu(1)
LIMITS = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}
WHOLE = {"nvidia.com/gpu": 1}
MEMORY_MIB = 3000 if LIBRARIES else GPU.memory_mib


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def variables(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return variables with which the loader finds the driver, as on a machine with GPUs."""
    driver = GpuDriver(folder=build(), state=tmp_path_factory.mktemp("driver") / "state")
    driver.create(GPU)
    own = driver.environment
    programs = tmp_path_factory.mktemp("programs")
    control = programs / PROGRAM
    control.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    control.chmod(0o755)
    path = os.pathsep.join((str(driver.folder), str(programs), own["PATH"]))
    return own | {"PATH": path, "LEASEHOLD_MPS": "private"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole(variables: Mapping[str, str]) -> AsyncIterator[Stack]:
    library = ("--library-source", str(LIBRARIES[0])) if LIBRARIES else ()
    flags = ("--gpus", "local", *library, "--combined")
    async with stack(*flags, env=variables, loader=True) as started:
        yield started


def one_pod(
    name: str,
    *command: str,
    limits: Mapping[str, int],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, object]:
    pod = gpu_pod(name, limits, annotations=annotations, restartPolicy="Never")
    pod["spec"]["containers"][0]["command"] = list(command)
    return pod


async def log(up: Stack, name: str) -> str:
    return (await up.kube.read(f"/api/v1/namespaces/default/pods/{name}/log")).decode()


async def test_a_pod_runs_its_command_on_the_gpu_of_this_machine(up: Stack) -> None:
    limits = LIMITS if LIBRARIES else WHOLE
    has_library = Path("/usr/local/vgpu").exists()
    script = "nvidia-smi -L; nvidia-smi; python3 -c 'import os; print(os.getpid())'; exit 3"
    await up.create(one_pod("mine", "sh", "-c", script, limits=limits))

    await up.until("mine", lambda pod: pod["status"].get("phase") == "Failed")

    shown = await log(up, "mine")
    assert f"UUID: {GPU.uuid}" in shown
    assert f"/ {MEMORY_MIB:7}MiB" in shown
    assert Path("/usr/local/vgpu").exists() is has_library, "the pod's is not this machine's"
    status = await up.leasehold("status")
    assert "this machine, with its own GPUs" in status.out
    assert "processes of this host: images are ignored" in status.out
    first = (up.root / "first-pod.yaml").read_text()
    assert ("gpumem" in first) is bool(LIBRARIES), "without a library there are no shares"
    refused = await up.leasehold("sim", "break", "node-0/0")
    assert (refused.code, "this machine's own" in refused.err) == (2, True)
    await up.audit()


async def test_use_of_the_gpu_is_of_the_pod_and_ends_with_it(up: Stack) -> None:
    limits = LIMITS if LIBRARIES else WHOLE
    await up.create(
        one_pod("uses", "gpu-load", "alloc 2g", "alloc 14g", "burn 600s", limits=limits)
    )

    async def used() -> dict[str, object]:
        shares = json.loads((await up.leasehold("top", "--json")).out)["shares"]
        return next((share["measured"] or {} for share in shares if share["name"] == "uses"), {})

    await until(used, lambda row: row.get("memory_mib") == 2048 + 256)
    shown = await until(lambda: log(up, "uses"), lambda text: "alloc 14g: " in text)
    await up.clear()

    assert "alloc 2g: ok\n" in shown
    assert "alloc 14g: out of memory\n" in shown
    assert (await run("pgrep", "-f", "alloc 14g")).code == 1


async def test_mps_holds_a_share_without_hami_core_by_a_daemon_that_ends_with_the_stack(
    up: Stack,
) -> None:
    commands = ("gpu-load", "alloc 2g", "alloc 1g", "sleep 600s")
    held = {"leasehold.dev/isolation": "mps"}
    await up.create(one_pod("held", *commands, limits=LIMITS, annotations=held))
    await up.until("held", running)

    shown = await until(lambda: log(up, "held"), lambda text: "alloc 1g: " in text)

    assert shown == "alloc 2g: ok\nalloc 1g: out of memory\n"
    explained = (await up.leasehold("explain", "held")).out
    assert "memory by MPS" in explained
    ended_by_down = leftovers(StateDir.at(up.root))
    daemons = [pid for pid in ended_by_down if "mps_daemon" in command_line(pid)]
    assert daemons


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


async def test_a_machine_without_gpus_is_told_what_to_do(tmp_path: Path) -> None:
    done = await run(*LEASEHOLD, "up", "--gpus", "local", "--state", str(tmp_path))

    assert not succeeded(done)
    assert "--gpus local needs a GPU of NVIDIA in this machine, and its driver" in done.err
    assert "omit the flag to simulate GPUs" in done.err
