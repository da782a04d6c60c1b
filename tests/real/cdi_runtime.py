"""runc for a containerd that has no CDI (before 1.7): it adds a container's hooks from CDI files.

`cdi_runtime.py CDI_DIR RUNC_ARGUMENT…`, called in a container's bundle. A container whose pod has
a GPU, as its variable tells, and for which there is no file is not created: neither does containerd
create a container with an unknown device. The state of the simulated GPUs is mounted beside.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

RUNC = "/usr/sbin/runc"
NAME = "io.kubernetes.cri.container-name"
MARK = "NEEDS_LIMIT=1"
_POD = re.compile(r"/pod([0-9a-f-]{36})/")


def add_hooks(bundle: Path, folder: Path) -> None:
    file = bundle / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    pod = _POD.search(config["linux"]["cgroupsPath"])
    name = config.get("annotations", {}).get(NAME, "")
    if not (pod and name and MARK in config["process"]["env"]):
        return
    limits = folder / f"leasehold.dev-limits-{pod[1]}-{name}.json"
    [device] = json.loads(limits.read_text())["devices"]
    for hook in device["containerEdits"]["hooks"]:
        added = {key: hook[key] for key in ("path", "args", "env", "timeout") if key in hook}
        config.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(added)
    gpus = {"destination": "/gpus", "source": str(folder.parent / "gpus"), "type": "bind"}
    config["mounts"].append(gpus | {"options": ["rbind", "rw"]})
    file.write_text(json.dumps(config))


def main(arguments: list[str]) -> None:
    folder, *rest = arguments
    if "create" in rest:
        bundle = rest[rest.index("--bundle") + 1] if "--bundle" in rest else "."
        add_hooks(Path(bundle), Path(folder))
    os.execv(RUNC, [RUNC, *rest])  # noqa: S606 - the program that this one stands for


if __name__ == "__main__":
    main(sys.argv[1:])
