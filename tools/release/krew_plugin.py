"""The plugin of kubectl for krew: its archive, and its manifest; pure.

https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from tools.release.archive import ArchivedFile

Json = dict[str, Any]

LAUNCHER = "kubectl-leasehold"
CAVEATS = """\
Needs Python 3.11 or newer with its module venv. The first run installs packages with pip, whose
settings apply. Completion in kubectl: put ~/.krew/store/leasehold/VERSION/venv/bin on PATH.
"""


def archive_name(number: str) -> str:
    """Return the name of the archive of version `number`."""
    return f"kubectl-leasehold-{number}.tar.gz"


def archived_files(
    wheel: ArchivedFile, lock: bytes, launcher: bytes, notices: Iterable[ArchivedFile]
) -> tuple[ArchivedFile, ...]:
    """Return the files of the archive: any platform, as pip chooses the packages' files."""
    return (
        ArchivedFile(LAUNCHER, launcher, executable=True),
        ArchivedFile("requirements.txt", lock),
        wheel,
        *notices,
    )


def manifest(number: str, archive: bytes, downloads: str) -> Json:
    """Return the manifest for the archive, which is at `downloads`/vVERSION/NAME."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "leasehold"},
        "spec": {
            "version": f"v{number}",
            "homepage": downloads.removesuffix("/releases/download"),
            "shortDescription": "Show who holds which GPU, and why pods wait for one",
            "description": "Reads Leasehold, GPU sharing for Kubernetes, with nothing but your "
            "kubeconfig and your own permissions: devices and leases (gpus, ps, top), why a pod "
            "waits or runs where it does (explain), GPU-time budgets (budget).\n",
            "caveats": CAVEATS,
            "platforms": [
                {
                    "selector": {
                        "matchExpressions": [
                            {"key": "os", "operator": "In", "values": ["darwin", "linux"]}
                        ]
                    },
                    "uri": f"{downloads}/v{number}/{archive_name(number)}",
                    "sha256": hashlib.sha256(archive).hexdigest(),
                    "bin": LAUNCHER,
                }
            ],
        },
    }
