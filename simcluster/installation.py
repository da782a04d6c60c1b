"""What is installed in a simulated cluster before it serves: objects, and accounts of processes.

The file has the form of `Installation`, in JSON. Objects that are there already are replaced, so
that a later release installs its own.
"""

from pathlib import Path

import msgspec

from simcluster.apimachinery.objects import Json, deep_copy, name_of
from simcluster.apiserver.kinds.service_account_tokens import ServiceAccountTokens
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.credentials import WEBHOOK_CLIENT, write_kubeconfig, write_private

_IDENTITY = {"apiVersion", "kind", "metadata"}
"""Objects with nothing else are as they were created."""


class InstalledAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A service account that a process outside the cluster uses, as if it ran in a pod."""

    namespace: str
    name: str
    kubeconfig: str
    """Path of the file, which is written with a token of the account."""
    node: str = ""
    """The node in its token; empty: none."""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    objects: tuple[Json, ...] = ()
    """In the order in which they are created."""
    accounts: tuple[InstalledAccount, ...] = ()
    webhook_client_ca: str = ""
    """Path of a file for the authority of the certificate with which webhooks are called."""

    @classmethod
    def load(cls, path: Path | None) -> "Installation":
        """Load the file; without one nothing is installed."""
        return cls() if path is None else msgspec.json.decode(path.read_bytes(), type=cls)

    def create_objects(self, store: ObjectStore) -> None:
        """Create the objects, or replace all but their metadata."""
        types = {(kind.api_version, kind.kind): kind.table for kind in store.kinds}
        for obj in self.objects:
            table = types[obj["apiVersion"], obj["kind"]]
            record = store.find(table, obj["metadata"].get("namespace"), name_of(obj))
            if record is None:
                store.create(table, deep_copy(obj))
            elif obj.keys() > _IDENTITY:
                store.update(
                    table, {**deep_copy(obj), "metadata": deep_copy(record.obj["metadata"])}
                )

    def write_kubeconfigs(self, tokens: ServiceAccountTokens, url: str, ca_pem: bytes) -> None:
        """Write a kubeconfig for each account, whose token lasts as long as the cluster."""
        for account in self.accounts:
            token = tokens.mounted_token(account.namespace, account.name, account.node)
            file = Path(account.kubeconfig)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_kubeconfig(file, url, ca_pem, token)

    def write_webhook_client_ca(self, tls: Path) -> None:
        """Copy the authority from the directory of the API server's certificates, if wanted."""
        if self.webhook_client_ca:
            file = Path(self.webhook_client_ca)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(file, (tls / WEBHOOK_CLIENT / "ca.crt").read_bytes())
