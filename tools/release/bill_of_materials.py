"""The bill of materials of the image's Python packages, as CycloneDX 1.6."""

import importlib.metadata
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

_PIN = re.compile(r"^([a-z0-9._-]+)==([^\s;]+)((?:.*\\\n)*.*)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def bill_of_materials(lock: str, version: str, built_at: int) -> Json:
    """Return the bill of Leasehold `version` with the packages of a lock file.

    `built_at` is in Unix seconds. The licence of a package that is not installed here is left out.
    """
    packages = [_component(*pin) for pin in _pins(lock)]
    subject = {
        "type": "application",
        "bom-ref": f"pkg:pypi/leasehold@{version}",
        "name": "leasehold",
        "version": version,
        "purl": f"pkg:pypi/leasehold@{version}",
        "licenses": [{"expression": "Apache-2.0"}],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'leasehold@{version}:{lock}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(built_at, UTC).isoformat().replace("+00:00", "Z"),
            "component": subject,
        },
        "components": packages,
        "dependencies": [
            {"ref": subject["bom-ref"], "dependsOn": [it["bom-ref"] for it in packages]}
        ],
    }


def _pins(lock: str) -> Iterator[tuple[str, str, list[str]]]:
    for name, version, rest in _PIN.findall(lock):
        yield name, version, _HASH.findall(rest)


def _component(name: str, version: str, hashes: list[str]) -> Json:
    purl = f"pkg:pypi/{name}@{version}"
    files = [{"alg": "SHA-256", "content": digest} for digest in hashes]
    made: Json = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "externalReferences": [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{name}/{version}/",
                "comment": "any of these files",
                "hashes": files,
            }
        ],
    }
    return made | _licences(name)


def _licences(name: str) -> Json:
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return {}
    if "License-Expression" in metadata:
        return {"licenses": [{"expression": metadata["License-Expression"]}]}
    stated = metadata["License"].splitlines() if "License" in metadata else []
    classified = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier") or ()
        if classifier.startswith("License :: ")
    ]
    names = classified or stated[:1]
    return {"licenses": [{"license": {"name": name}} for name in names]} if names else {}
