"""Secrets and ConfigMaps of one namespace; the manifests install them empty."""

import base64
import binascii
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from services.auth.auth_callout import ServiceNamespaces
from services.auth.root_secret import ManagedObject
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.types import RawObject
from shared.model.errors import ConflictError, RequestError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredData:
    """The data of an object, and the version at which it was read."""

    version: str
    data: Mapping[str, bytes]


class DataObjectStore:
    """The Secrets and ConfigMaps of one namespace."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    async def load(self, kind: str, name: str) -> StoredData:
        """Read one. Raises UnavailableError if it does not exist or the API server is down."""
        try:
            found = await self.client.read(self._path(kind, name), RawObject)
        except NotFoundError as error:
            raise UnavailableError(
                f"{kind} {self.namespace}/{name} not found: apply the manifests again, which "
                "contain it empty"
            ) from error
        data = found.data or {}
        return StoredData(
            version=found.metadata.resource_version,
            data={key: _decode(kind, name, text) for key, text in data.items()},
        )

    async def save(self, kind: str, name: str, data: Mapping[str, bytes], version: str) -> None:
        """Write these keys. Raises ConflictError if the object changed after `version`."""
        encoded = {key: _encode(kind, value) for key, value in data.items()}
        body = {"metadata": {"resourceVersion": version}, "data": encoded}
        try:
            await self.client.patch_merge(self._path(kind, name), body)
        except KubernetesConflictError as error:
            raise ConflictError(f"{name} has changed since version {version}") from error

    async def apply(self, managed: ManagedObject) -> bool:
        """Write an object unless it holds this data already; return whether it was written."""
        while True:
            stored = await self.load(managed.kind, managed.name)
            if all(stored.data.get(key) == value for key, value in managed.data.items()):
                return False
            with contextlib.suppress(ConflictError):  # another replica writes the same
                await self.save(managed.kind, managed.name, managed.data, stored.version)
                return True

    def _path(self, kind: str, name: str) -> str:
        return f"/api/v1/namespaces/{quote(self.namespace, safe='')}/{kind}/{quote(name, safe='')}"


class RootSecretStore:
    """The root Secret, and the objects derived from it."""

    def __init__(self, client: KubernetesClient, namespaces: ServiceNamespaces, name: str) -> None:
        self.objects = DataObjectStore(client, namespaces.system)
        self.agents_objects = DataObjectStore(client, namespaces.agents)
        self.name = name

    async def load(self) -> tuple[Mapping[str, bytes], str]:
        """Return the root Secret's data and version."""
        stored = await self.objects.load("secrets", self.name)
        return stored.data, stored.version

    async def save(self, data: Mapping[str, bytes], version: str) -> None:
        """Write the root Secret. Raises ConflictError if it changed after `version`."""
        await self.objects.save("secrets", self.name, data, version)

    async def apply(self, managed: ManagedObject) -> bool:
        """Write a derived object; return False if it held this data already."""
        objects = self.agents_objects if managed.for_agents else self.objects
        return await objects.apply(managed)


def _encode(kind: str, value: bytes) -> str:
    return base64.b64encode(value).decode() if kind == "secrets" else value.decode()


def _decode(kind: str, name: str, text: str) -> bytes:
    if kind != "secrets":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RequestError(f"the Secret {name} is not valid base64: {error}") from error
