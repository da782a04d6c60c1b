"""Where a webhook is reached: its URL, or an endpoint of the Service it names."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from simcluster.apimachinery.objects import Json, at_path
from simcluster.apiserver.storage.store import ObjectStore

_SERVICE_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class WebhookAddress:
    """`url` names the webhook in messages, `dialled` leads there; TLS is for `server_name`."""

    url: str
    dial_url: str
    host: str
    server_name: str


def resolve_address(config: Json, store: ObjectStore) -> WebhookAddress:
    """Return where a `clientConfig` points; `LookupError` says why it points nowhere."""
    if config.get("url"):
        parts = urlsplit(config["url"])
        url = config["url"].rstrip("?")
        return WebhookAddress(url, url, parts.netloc, parts.hostname or "")
    asked = config["service"]
    namespace, name = asked["namespace"], asked["name"]
    port = int(asked.get("port") or 443)
    found = store.find("services", namespace, name)
    if found is None:
        raise LookupError(f'service "{name}" not found')
    listed = at_path(found.obj, "spec.ports") or ()
    chosen = next((each for each in listed if each.get("port") == port), None)
    if chosen is None:
        raise LookupError(f'no service port {port} found for service "{name}"')
    host = f"{name}.{namespace}.svc"
    path = "/" + str(asked.get("path") or "").lstrip("/")
    if at_path(found.obj, "spec.type") == "ExternalName":
        reached = f"{at_path(found.obj, 'spec.externalName')}:{port}"
    else:
        endpoints = _endpoints(store, namespace, name, str(chosen.get("name") or ""))
        reached = next(endpoints, "")
    if not reached:
        raise LookupError(f'no endpoints available for service "{name}"')
    return WebhookAddress(f"https://{host}:{port}{path}", f"https://{reached}{path}", host, host)


def _endpoints(store: ObjectStore, namespace: str, name: str, port_name: str) -> Iterator[str]:
    slices = store.list("endpointslices", namespace, labels=f"{_SERVICE_LABEL}={name}")
    for each in slices:
        addresses = [
            address
            for endpoint in each.get("endpoints") or ()
            if at_path(endpoint, "conditions.ready") is not False
            for address in endpoint.get("addresses") or ()
        ]
        yield from _pairs(addresses, each.get("ports") or [], port_name)
    old = store.find("endpoints", namespace, name)
    for subset in (old.obj.get("subsets") or ()) if old is not None else ():
        ready = [str(each.get("ip")) for each in subset.get("addresses") or ()]
        yield from _pairs(ready, subset.get("ports") or [], port_name)


def _pairs(addresses: list[str], ports: list[Json], port_name: str) -> Iterator[str]:
    for port in ports:
        if str(port.get("name") or "") == port_name:
            for address in addresses:
                host = f"[{address}]" if ":" in address else address
                yield f"{host}:{port.get('port')}"
