"""Secrets and ConfigMaps; the manifests install them empty."""

import contextlib
from collections.abc import Mapping

from services.auth.auth_callout import ServiceNamespaces
from services.auth.root_secret import ManagedObject
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.paths import objects_path
from shared.kubernetes.types import ApiSecret, RawObject
from shared.model.errors import ConflictError, UnavailableError


class RootSecretStore:
    def __init__(self, client: KubernetesClient, namespaces: ServiceNamespaces, name: str) -> None:
        self.client = client
        self.namespaces = namespaces
        self.name = name

    async def load(self) -> tuple[Mapping[str, bytes], str]:
        """Return the root Secret's data and version. Raises UnavailableError."""
        return await self._read(self._root({}))

    async def save(self, data: Mapping[str, bytes], version: str) -> None:
        """Raises ConflictError if it changed after `version`."""
        await self._write(self._root(data), version)

    async def apply(self, managed: ManagedObject) -> bool:
        """Return False if the object held this data already."""
        while True:
            data, version = await self._read(managed)
            if all(data.get(key) == value for key, value in managed.data.items()):
                return False
            with contextlib.suppress(ConflictError):  # another replica writes the same
                await self._write(managed, version)
                return True

    def _root(self, data: Mapping[str, bytes]) -> ManagedObject:
        return ManagedObject(kind="secrets", name=self.name, data=data)

    async def _read(self, managed: ManagedObject) -> tuple[Mapping[str, bytes], str]:
        kind = managed.kind
        name = managed.name
        try:
            if managed.kind == "secrets":
                secret = await self.client.read(self._path(managed), ApiSecret)
                return secret.data or {}, secret.metadata.resource_version
            config_map = await self.client.read(self._path(managed), RawObject)
        except NotFoundError as error:
            raise UnavailableError(
                f"{kind} {self._namespace(managed)}/{name} not found: apply the manifests again, "
                "which contain it empty"
            ) from error
        data = {key: text.encode() for key, text in (config_map.data or {}).items()}
        return data, config_map.metadata.resource_version

    async def _write(self, managed: ManagedObject, version: str) -> None:
        data: Mapping[str, object] = managed.data
        if managed.kind != "secrets":
            data = {key: value.decode() for key, value in managed.data.items()}
        body = {"metadata": {"resourceVersion": version}, "data": data}
        try:
            await self.client.patch_merge(self._path(managed), body)
        except KubernetesConflictError as error:
            raise ConflictError(f"{managed.name} has changed since version {version}") from error

    def _namespace(self, managed: ManagedObject) -> str:
        return self.namespaces.agents if managed.for_agents else self.namespaces.system

    def _path(self, managed: ManagedObject) -> str:
        return objects_path(self._namespace(managed), managed.kind, managed.name)
