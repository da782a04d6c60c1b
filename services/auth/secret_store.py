"""Secrets and config maps of one namespace, by name; they are installed empty, and filled here."""

import base64
import binascii
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from services.auth.secrets import Handout
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.model.errors import ConflictError, RequestError, UnavailableError


class _Metadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion", default="")


class _Object(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    data: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an object holds, and at which version it was read."""

    version: str
    data: Mapping[str, bytes]


class Objects:
    """The objects of one namespace."""

    def __init__(self, kube: KubernetesClient, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace

    async def load(self, kind: str, name: str) -> Stored:
        """Read one. Raises UnavailableError if it is not installed, or the API server is away."""
        try:
            found = await self.kube.read(self._path(kind, name), _Object)
        except NotFoundError as error:
            raise UnavailableError(
                f"there is no {name} among {kind} of {self.namespace}: apply the manifests, which "
                "have it empty, again"
            ) from error
        data = found.data or {}
        return Stored(
            version=found.metadata.version,
            data={key: _decoded(kind, name, text) for key, text in data.items()},
        )

    async def save(self, kind: str, name: str, data: Mapping[str, bytes], version: str) -> None:
        """Write these keys. Raises ConflictError if it was changed since it was read."""
        written = {key: _encoded(kind, value) for key, value in data.items()}
        body = {"metadata": {"resourceVersion": version}, "data": written}
        try:
            await self.kube.patch_merge(self._path(kind, name), body)
        except KubernetesConflictError as error:
            raise ConflictError(f"{name} was changed meanwhile") from error

    async def hand_out(self, handout: Handout) -> bool:
        """Write an object if it does not hold what it should; say whether it was written."""
        while True:
            stored = await self.load(handout.kind, handout.name)
            if all(stored.data.get(key) == value for key, value in handout.data.items()):
                return False
            with contextlib.suppress(ConflictError):  # another replica writes the same
                await self.save(handout.kind, handout.name, handout.data, stored.version)
                return True

    def _path(self, kind: str, name: str) -> str:
        return f"/api/v1/namespaces/{quote(self.namespace, safe='')}/{kind}/{quote(name, safe='')}"


def _encoded(kind: str, value: bytes) -> str:
    return base64.b64encode(value).decode() if kind == "secrets" else value.decode()


def _decoded(kind: str, name: str, text: str) -> bytes:
    if kind != "secrets":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RequestError(f"the Secret {name} is damaged: {error}") from error
