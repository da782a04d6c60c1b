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
    "env": lambda value: re.fullmatch(r"[^=]+=.*", value),
    "deviceNodes": lambda value: (
        value["path"] and set(value) <= {"path", "hostPath", "permissions"}
    ),
    "mounts": lambda value: value["hostPath"] and value["containerPath"],
    "hooks": lambda value: (
        value["hookName"] in HOOKS and value["path"].startswith("/") and value["args"]
    ),
}


def cdi_specification(path: Path) -> dict[str, Any]:
    """Read a specification, and assert that a runtime takes it."""
    document: dict[str, Any] = json.loads(path.read_text())
    assert set(document) <= {"cdiVersion", "kind", "devices", "containerEdits"}
    assert document["cdiVersion"] == "0.5.0"
    vendor, _, kind = document["kind"].partition("/")
    assert VENDOR.fullmatch(vendor)
    assert CLASS.fullmatch(kind)
    names = [device["name"] for device in document["devices"]]
    assert len(set(names)) == len(names)
    for device in document["devices"]:
        assert set(device) == {"name", "containerEdits"}
        assert DEVICE.fullmatch(device["name"])
        assert any(device["containerEdits"].values()), "a device without edits is refused"
        _check(device["containerEdits"])
    _check(document.get("containerEdits", {}))
    return document


def cdi_devices(path: Path) -> dict[str, dict[str, Any]]:
    """Return the edits of each device, by its CDI name."""
    specification = cdi_specification(path)
    return {
        f"{specification['kind']}={device['name']}": device["containerEdits"]
        for device in specification["devices"]
    }


def _check(edits: Mapping[str, Any]) -> None:
    for key, entries in edits.items():
        for entry in entries:
            assert EDITS[key](entry), (key, entry)
