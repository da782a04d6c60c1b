"""The address of a webhook: its URL, or an endpoint of its Service."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from simcluster.apimachinery.objects import Json, at_path, name_of, namespace_of
from simcluster.apiserver.storage.store import ObjectStore

_SERVICE_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class WebhookAddress:
    """`url` is for messages, `dial_url` for the connection, `server_name` for TLS."""

    url: str
    dial_url: str
    host: str
    server_name: str


def resolve_address(config: Json, store: ObjectStore) -> WebhookAddress:
    """Return the address of a `clientConfig`; raises `LookupError` with the reason."""
    if config.get("url"):
        parts = urlsplit(config["url"])
        url = config["url"].rstrip("?")
        return WebhookAddress(url, url, parts.netloc, parts.hostname or "")
    wanted = config["service"]
    namespace, name = wanted["namespace"], wanted["name"]
    port = int(wanted.get("port") or 443)
    record = store.find("services", namespace, name)
    if record is None:
        raise LookupError(f'service "{name}" not found')
    host = f"{name}.{namespace}.svc"
    path = "/" + str(wanted.get("path") or "").lstrip("/")
    endpoint = endpoint_of_port(store, record.obj, str(port))
    return WebhookAddress(f"https://{host}:{port}{path}", f"https://{endpoint}{path}", host, host)


def endpoint_of_port(store: ObjectStore, service: Json, port: str) -> str:
    """Return host and port of one endpoint of a service; `LookupError` if there is none.

    `port` is the number or name of a port of the service; empty: its first one.
    """
    name = name_of(service)
    ports = at_path(service, "spec.ports") or ()
    matching = (each for each in ports if port in {"", str(each.get("port")), each.get("name")})
    chosen = next(matching, None)
    if chosen is None:
        raise LookupError(f'no service port {port} found for service "{name}"')
    if at_path(service, "spec.type") == "ExternalName":
        return f"{at_path(service, 'spec.externalName')}:{port}"
    endpoints = _endpoints(store, namespace_of(service), name, str(chosen.get("name") or ""))
    endpoint = next(endpoints, "")
    if not endpoint:
        raise LookupError(f'no endpoints available for service "{name}"')
    return endpoint


def _endpoints(store: ObjectStore, namespace: str, name: str, port_name: str) -> Iterator[str]:
    slices = store.list("endpointslices", namespace, labels=f"{_SERVICE_LABEL}={name}")
    for endpoint_slice in slices:
        yield from _pairs(
            _ready_addresses(endpoint_slice), endpoint_slice.get("ports") or [], port_name
        )
    endpoints = store.find("endpoints", namespace, name)
    subsets = [] if endpoints is None else endpoints.obj.get("subsets") or []
    for subset in subsets:
        addresses = [str(address.get("ip")) for address in subset.get("addresses") or ()]
        yield from _pairs(addresses, subset.get("ports") or [], port_name)


def _ready_addresses(endpoint_slice: Json) -> list[str]:
    return [
        address
        for endpoint in endpoint_slice.get("endpoints") or ()
        if at_path(endpoint, "conditions.ready") is not False
        for address in endpoint.get("addresses") or ()
    ]


def _pairs(addresses: list[str], ports: list[Json], port_name: str) -> Iterator[str]:
    for port in ports:
        if str(port.get("name") or "") == port_name:
            for address in addresses:
                host = f"[{address}]" if ":" in address else address
                yield f"{host}:{port.get('port')}"
