"""The front proxy: how the API server presents itself, and whose requests it passes on.

https://kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer/
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import web

from services.api.aggregated.objects import GROUP, VERSION
from shared.credentials.certificate_rotation import ServingCertificate
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.tokens import TokenUser
from shared.kubernetes.types import RawObject
from shared.model.errors import RequestError

CONFIGURATION = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
REGISTRATION = f"/apis/apiregistration.k8s.io/v1/apiservices/{VERSION}.{GROUP}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontProxy:
    authorities: str
    names: tuple[str, ...]
    """Common names of its certificate; empty for any that its authorities have issued."""
    user: tuple[str, ...]
    groups: tuple[str, ...]
    extra: tuple[str, ...]
    """Names of headers; in `extra`, prefixes."""

    @classmethod
    def parse(cls, data: Mapping[str, str]) -> "FrontProxy":
        """Raises RequestError if the cluster's ConfigMap is of no use.

        Where users' certificates have the same authority, only names distinguish the API server
        from users.
        """
        authorities = data.get("requestheader-client-ca-file", "")
        lists = ("allowed-names", "username-headers", "group-headers", "extra-headers-prefix")
        try:
            names, user, groups, extra = (
                tuple(map(str, json.loads(data.get(f"requestheader-{name}") or "[]")))
                for name in lists
            )
        except (ValueError, TypeError) as error:
            raise RequestError(f"{CONFIGURATION} is invalid: {error}") from error
        if not authorities or not user:
            raise RequestError(
                "the API server has no --requestheader-client-ca-file: its aggregation layer is off"
            )
        if not names and _certificates(authorities) & _certificates(data.get("client-ca-file", "")):
            raise RequestError(
                "the API server's --requestheader-client-ca-file is also its --client-ca-file, and "
                "--requestheader-allowed-names is empty: any user could pretend to be any other"
            )
        return cls(authorities=authorities, names=names, user=user, groups=groups, extra=extra)

    def require(self, certificate: ServingCertificate) -> None:
        try:
            certificate.require(self.authorities)
        except RequestError as error:
            raise RequestError(f"{CONFIGURATION} has no valid certificate: {error}") from error

    def user_of(self, request: web.Request) -> TokenUser | None:
        certificate = request.get_extra_info("peercert") or {}
        subject = {key: value for part in certificate.get("subject", ()) for key, value in part}
        headers = request.headers
        name = next((headers[header] for header in self.user if headers.get(header)), "")
        if (
            not certificate
            or not name
            or (self.names and subject.get("commonName") not in self.names)
        ):
            return None
        extra: dict[str, tuple[str, ...]] = {}
        for prefix in self.extra:
            for key in {key for key in headers if key.lower().startswith(prefix.lower())}:
                extra[unquote(key[len(prefix) :]).lower()] = tuple(headers.getall(key))
        groups = (group for header in self.groups for group in headers.getall(header, ()))
        return TokenUser(username=name, groups=tuple(groups), extra=extra)


def _certificates(pem: str) -> set[str]:
    return {
        "".join(certificate.split())
        for certificate in pem.split("-----END CERTIFICATE-----")
        if certificate.strip()
    }


async def read_front_proxy(kube: KubernetesClient) -> FrontProxy:
    """Raises RequestError or UnavailableError."""
    return FrontProxy.parse((await kube.read(CONFIGURATION, RawObject)).data or {})


@dataclass(slots=True)
class Registration:
    """The APIService that has the authorities; its manifest creates it."""

    kube: KubernetesClient

    async def trust(self, authorities: bytes) -> None:
        """Write the authorities (PEM) unless the APIService has them, or does not exist."""
        bundle = base64.b64encode(authorities).decode()
        try:
            spec = (await self.kube.read(REGISTRATION, RawObject)).spec or {}
        except NotFoundError:
            return
        if spec.get("caBundle") != bundle:
            await self.kube.patch_merge(REGISTRATION, {"spec": {"caBundle": bundle}})
