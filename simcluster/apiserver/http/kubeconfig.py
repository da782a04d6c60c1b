"""The file that tells kubectl and our services where the cluster is and how to get in."""

import base64
from pathlib import Path

import yaml

from simcluster.apiserver.http.certificates import write_private
from simcluster.apiserver.storage.objects import Json

CONTEXT = "leasehold"


def kubeconfig(url: str, ca_pem: bytes, token: str) -> Json:
    """Return a kubeconfig with one context whose namespace is `default`."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CONTEXT,
        "clusters": [
            {
                "name": CONTEXT,
                "cluster": {
                    "server": url,
                    "certificate-authority-data": base64.b64encode(ca_pem).decode(),
                },
            }
        ],
        "users": [{"name": CONTEXT, "user": {"token": token}}],
        "contexts": [
            {
                "name": CONTEXT,
                "context": {"cluster": CONTEXT, "user": CONTEXT, "namespace": "default"},
            }
        ],
    }


def write_kubeconfig(path: Path, url: str, ca_pem: bytes, token: str) -> None:
    """Write it at once and readable by its owner only: it holds the token."""
    content = yaml.safe_dump(kubeconfig(url, ca_pem, token), sort_keys=False)
    write_private(path, content.encode())
