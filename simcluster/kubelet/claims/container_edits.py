"""What CDI specifications add to containers: variables, mounts and device nodes.

The part of a container runtime with CDI: https://github.com/cncf-tags/container-device-interface.
Hooks are not run.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from proto.deviceplugin import api_pb2
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.devices.kubelet_devices import AllocationError


def container_edits(
    directory: Path, names: Iterable[str]
) -> api_pb2.ContainerAllocateResponse | None:
    """Return what the devices of these qualified names add to a container; None: nothing.

    Raises AllocationError for a device that no specification has.
    """
    wanted = tuple(dict.fromkeys(names))
    if not wanted:
        return None
    devices = _devices(directory)
    missing = [name for name in wanted if name not in devices]
    if missing:
        raise AllocationError(f"unresolvable CDI devices {', '.join(missing)}")
    environment: dict[str, str] = {}
    mounts: list[api_pb2.Mount] = []
    nodes: list[api_pb2.DeviceSpec] = []
    for name in wanted:
        for edits in devices[name]:
            environment |= dict(entry.split("=", 1) for entry in edits.get("env") or ())
            mounts += map(_mount, edits.get("mounts") or ())
            nodes += [
                api_pb2.DeviceSpec(container_path=node["path"], host_path=node["path"])
                for node in edits.get("deviceNodes") or ()
            ]
    return api_pb2.ContainerAllocateResponse(envs=environment, mounts=mounts, devices=nodes)


def _devices(directory: Path) -> dict[str, list[Json]]:
    """Return the edits of each device in a directory, with those that its whole file adds."""
    found: dict[str, list[Json]] = {}
    for path in sorted(directory.glob("*.json")):
        specification = msgspec.json.decode(path.read_bytes())
        common = [specification["containerEdits"]] if "containerEdits" in specification else []
        for device in specification["devices"]:
            name = f"{specification['kind']}={device['name']}"
            found[name] = [*common, device["containerEdits"]]
    return found


def _mount(mount: Json) -> api_pb2.Mount:
    return api_pb2.Mount(
        container_path=mount["containerPath"],
        host_path=mount["hostPath"],
        read_only="ro" in (mount.get("options") or ()),
    )
