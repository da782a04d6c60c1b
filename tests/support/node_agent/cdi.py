"""Whether a file is a CDI specification: the rules of version 0.5.0 of the interface."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VENDOR = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]")
CLASS = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?")
DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
HOOKS = {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
EDITS: Mapping[str, Callable[[Any], object]] = {
    "env": lambda one: re.fullmatch(r"[^=]+=.*", one),
    "deviceNodes": lambda one: one["path"] and set(one) <= {"path", "hostPath", "permissions"},
    "mounts": lambda one: one["hostPath"] and one["containerPath"],
    "hooks": lambda one: one["hookName"] in HOOKS and one["path"].startswith("/") and one["args"],
}


def cdi_specification(path: Path) -> dict[str, Any]:
    """Read a specification, and assert that a runtime takes it."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert set(found) <= {"cdiVersion", "kind", "devices", "containerEdits"}
    assert found["cdiVersion"] == "0.5.0"
    vendor, _, kind = found["kind"].partition("/")
    assert VENDOR.fullmatch(vendor)
    assert CLASS.fullmatch(kind)
    names = [device["name"] for device in found["devices"]]
    assert len(set(names)) == len(names)
    for device in found["devices"]:
        assert set(device) == {"name", "containerEdits"}
        assert DEVICE.fullmatch(device["name"])
        assert any(device["containerEdits"].values()), "a device without edits is refused"
        _check(device["containerEdits"])
    _check(found.get("containerEdits", {}))
    return found


def cdi_devices(path: Path) -> dict[str, dict[str, Any]]:
    """Return the edits of each device, by its CDI name."""
    found = cdi_specification(path)
    return {f"{found['kind']}={one['name']}": one["containerEdits"] for one in found["devices"]}


def _check(edits: Mapping[str, Any]) -> None:
    for key, entries in edits.items():
        for one in entries:
            assert EDITS[key](one), (key, one)
