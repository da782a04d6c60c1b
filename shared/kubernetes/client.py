"""The Kubernetes API client: typed requests, responses and errors.

Every call is bounded by the timeout and raises only our own errors (`errors.py`). After an
UnreachableError a write may or may not have happened, so a retry must be safe: a second Binding, or
a second create of the same name, raises KubernetesConflictError.
"""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload
from urllib.parse import urlencode

import aiohttp
import msgspec
from yarl import URL

from shared.kubernetes.errors import UnexpectedResponseError, UnreachableError, parse_error
from shared.kubernetes.kubeconfig import (
    ClusterCredentials,
    ExecPlugin,
    KubeconfigError,
    is_token,
    tls_context,
)
from shared.kubernetes.paths import pod_path
from shared.model.errors import UNDECODABLE, RequestError, UnavailableError

TOKEN_AGE_S = 60.0
"""How long a token is used before its file is read again."""
EXPIRY_MARGIN_S = 10.0
"""A plugin runs again this long before its credential expires."""


class RequestAuthentication:
    """A token file is read again every minute, a plugin runs again when its credential expires.

    Both also after a 401.
    """

    def __init__(self, credentials: ClusterCredentials, *, clock: Callable[[], float]) -> None:
        self._file = credentials.token_file
        self._token = credentials.token
        self._plugin = credentials.exec_plugin
        self._clock = clock
        self._read_at = float("-inf")
        self._expires_at = float("-inf")
        self._running = asyncio.Lock()
        self.certificate: tuple[str, str] | None = None
        """PEM, of the plugin."""

    async def headers(self) -> dict[str, str]:
        """Raises KubeconfigError or ExecPluginError."""
        if self._file is not None and self._clock() - self._read_at >= TOKEN_AGE_S:
            self._read(self._file)
        if self._plugin is not None:
            async with self._running:
                if time.time() >= self._expires_at:
                    await self._run(self._plugin)
        return {} if self._token is None else {"Authorization": f"Bearer {self._token}"}

    async def headers_after_refusal(self) -> dict[str, str]:
        self._read_at = float("-inf")
        self._expires_at = self._read_at
        return await self.headers()

    async def _run(self, plugin: ExecPlugin) -> None:
        status = await asyncio.to_thread(plugin.run)
        expires = status.expiration_timestamp
        self._expires_at = expires.timestamp() - EXPIRY_MARGIN_S if expires else float("inf")
        self._token = status.token or None
        pair = status.client_certificate_data, status.client_key_data
        self.certificate = pair if all(pair) else None

    def _read(self, file: Path) -> None:
        try:
            token = file.read_text().strip()
            reason = "" if is_token(token) else "it is not one token"
        except OSError as error:
            reason = error.strerror or str(error)
        except UnicodeDecodeError:
            reason = "it is not text"
        if reason:
            if self._token is not None:
                return
            raise KubeconfigError(
                str(file), f"cannot be read ({reason})", "Check the service account's mount"
            )
        self._token = token
        self._read_at = self._clock()


T = TypeVar("T")
K = TypeVar("K")

MOST_ITEM_BYTES = 32 << 20
"""JSON is several times as long as the 1.5 MB that the API server stores."""
_ITEMS = b'"items":['
_BETWEEN = b',{"metadata":'
"""As Kubernetes writes lists; one of another form is split at its end only."""
LIST_S = 60.0
"""Time limit of a list without pages; its parts arrive within the timeout of all requests."""
CONNECTIONS = 32
PAGE_SIZE = 500
MOST_PAGE_BYTES = 32 << 20
"""A page that is larger is requested again with fewer objects: each may have 1.5 MB."""
PAGE_STEP = 5
LEAST_PAGE = 20
WATCH_BUFFER_BYTES = 1 << 20
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class Page(msgspec.Struct, frozen=True):
    """An invalid item does not affect others."""

    metadata: ListMetadata = ListMetadata()
    items: tuple[msgspec.Raw, ...] | None = ()

    def read(
        self, kind: type[T], skip: Callable[[RequestError], None] | None = None
    ) -> Iterator[T]:
        """Call `skip` with the error of an item that cannot be decoded.

        Without `skip`, raises UnexpectedResponseError.
        """
        for item in self.items or ():
            try:
                decoded = _decode(bytes(item), kind)
            except UnexpectedResponseError as error:
                if skip is None:
                    raise
                skip(error)
            else:
                yield decoded


class ListItems:
    """Splits a list into its items as its bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._started = False
        self._looked_at = 0

    def add(self, part: bytes) -> Iterator[bytes]:
        """Yield the items that are complete now. Raises UnexpectedResponseError for a large one."""
        self._buffer += part
        if not self._started and (start := self._buffer.find(_ITEMS)) >= 0:
            self._started = True
            self._looked_at = 0
            del self._buffer[: start + len(_ITEMS)]
        while self._started and (end := self._buffer.find(_BETWEEN, self._looked_at)) >= 0:
            self._looked_at = end + 1
            item = bytes(self._buffer[:end])
            if _is_complete(item):
                del self._buffer[: end + 1]
                self._looked_at = 0
                yield item
        self._looked_at = max(self._looked_at, len(self._buffer) - len(_BETWEEN))
        if len(self._buffer) > MOST_ITEM_BYTES:
            raise UnexpectedResponseError(
                f"a response has a list with an item of more than {MOST_ITEM_BYTES >> 20} MiB"
            )

    @property
    def rest(self) -> bytes:
        """A list of what is left."""
        return b"{" + _ITEMS + self._buffer if self._started else bytes(self._buffer)


def _is_complete(item: bytes) -> bool:
    """An object is not complete before its last byte: the text may also be between inner ones."""
    try:
        msgspec.json.decode(item, type=msgspec.Raw)
    except UNDECODABLE:
        return False
    return True


class KubernetesClient:
    """A pool of keep-alive connections to one API server.

    For example::

        async with KubernetesClient(credentials) as client:
            pod = await client.read(pod_path("ml", "train-0"), ApiPod)
    """

    def __init__(
        self,
        credentials: ClusterCredentials,
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.credentials = credentials
        self._timeout_s = timeout_s
        self._clock = clock
        self._authentication = RequestAuthentication(credentials, clock=clock)
        self._page_limits: dict[str, int] = {}
        self._tls: ssl.SSLContext | None = None
        self._encode = msgspec.json.Encoder().encode
        self._session: aiohttp.ClientSession | None = None

    def use(self, credentials: ClusterCredentials) -> None:
        """Requests in progress finish with the old credentials.

        Raises KubeconfigError if a certificate or key is unusable, and then changes nothing.
        """
        https = credentials.server.startswith("https:")
        self._tls = tls_context(credentials) if https else None
        self._tls_certificate: tuple[str, str] | None = None
        self.credentials = credentials
        self._authentication = RequestAuthentication(credentials, clock=self._clock)

    def _use_certificate(self, certificate: tuple[str, str] | None) -> None:
        if certificate is None or certificate == self._tls_certificate or self._tls is None:
            return
        cert_pem, key_pem = certificate
        self._tls = tls_context(
            replace(self.credentials, client_cert_pem=cert_pem, client_key_pem=key_pem)
        )
        self._tls_certificate = certificate

    async def __aenter__(self) -> Self:
        self.use(self.credentials)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "Accept": JSON,
                "Accept-Encoding": "identity",
                "User-Agent": f"leasehold/{version('leasehold')}",
            },
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def bind_pod(
        self,
        namespace: str,
        name: str,
        uid: str,
        node: str,
        annotations: Mapping[str, str],
        *,
        traceparent: str | None = None,
    ) -> None:
        """Bind the pod to its node and set its annotations in one write.

        Raises KubernetesConflictError if the pod is bound already or has another uid.
        """
        metadata = {"name": name, "namespace": namespace, "uid": uid, "annotations": annotations}
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._send(
            "POST",
            f"{pod_path(namespace, name)}/binding",
            self._encode(binding),
            extra={"traceparent": traceparent} if traceparent else None,
        )

    @overload
    async def read(self, path: str) -> bytes: ...
    @overload
    async def read(self, path: str, kind: type[T]) -> T: ...
    async def read(self, path: str, kind: type[T] | None = None) -> T | bytes:
        return _as(kind, await self._send("GET", path))

    @overload
    async def create(self, path: str, body: object) -> bytes: ...
    @overload
    async def create(self, path: str, body: object, kind: type[T]) -> T: ...
    async def create(self, path: str, body: object, kind: type[T] | None = None) -> T | bytes:
        return _as(kind, await self._send("POST", path, self._encode(body)))

    @overload
    async def patch_merge(self, path: str, body: object) -> bytes: ...
    @overload
    async def patch_merge(self, path: str, body: object, kind: type[T]) -> T: ...
    async def patch_merge(self, path: str, body: object, kind: type[T] | None = None) -> T | bytes:
        """Null deletes a field."""
        return _as(kind, await self._send("PATCH", path, self._encode(body), MERGE_PATCH))

    async def patch_json(self, path: str, operations: object) -> None:
        await self._send("PATCH", path, self._encode(operations), JSON_PATCH)

    @overload
    async def patch_strategic(self, path: str, body: object) -> bytes: ...
    @overload
    async def patch_strategic(self, path: str, body: object, kind: type[T]) -> T: ...
    async def patch_strategic(
        self, path: str, body: object, kind: type[T] | None = None
    ) -> T | bytes:
        """Lists merge by key."""
        return _as(kind, await self._send("PATCH", path, self._encode(body), STRATEGIC_PATCH))

    async def apply(self, path: str, body: object, *, manager: str) -> bytes:
        """Apply on the server the fields that `manager` owns, also those of another one."""
        target = f"{path}?{urlencode({'fieldManager': manager, 'force': 'true'})}"
        return await self._send("PATCH", target, self._encode(body), APPLY_PATCH)

    async def delete(
        self, path: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """Raises KubernetesConflictError if the object has another `uid`."""
        options: dict[str, object] = {}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        await self._send("DELETE", path, self._encode(options) if options else None)

    async def evict(self, namespace: str, name: str, *, uid: str, dry_run: bool = False) -> None:
        """Raises EvictionBlockedError while a PodDisruptionBudget forbids it."""
        options = {"preconditions": {"uid": uid}} | ({"dryRun": ["All"]} if dry_run else {})
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        await self._send("POST", f"{pod_path(namespace, name)}/eviction", self._encode(eviction))

    async def date(self) -> str:
        path = "/version"
        with _translating("GET", path):
            response = await self._open("GET", path)
            await response.read()
            return response.headers.get("Date", "")

    async def list_page(
        self, path: str, *, query: Mapping[str, str], limit: int, continue_token: str = ""
    ) -> Page:
        """Return fewer objects than `limit` if these are large.

        Raises ExpiredError if the continue token has expired.
        """
        limit = min(limit, self._page_limits.get(path, limit))
        token = {"continue": continue_token} if continue_token else {}
        while True:
            target = f"{path}?{urlencode({**query, 'limit': str(limit), **token})}"
            body = await self._read_page(target, MOST_PAGE_BYTES if limit > LEAST_PAGE else inf)
            if body is not None:
                if len(body) < MOST_PAGE_BYTES / PAGE_STEP:
                    self._page_limits.pop(path, None)
                return _decode(body, Page)
            limit = self._page_limits[path] = max(LEAST_PAGE, limit // PAGE_STEP)

    async def _read_page(self, target: str, most_bytes: float) -> bytes | None:
        """Return None for more bytes."""
        with _translating("GET", target):
            response = await self._open("GET", target)
            try:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > most_bytes:
                        return None
                return bytes(body)
            finally:
                response.close()  # after its end, the connection stays open

    async def list_whole(self, path: str, kind: type[T], keep: Callable[[T], K]) -> tuple[K, ...]:
        """Return what `keep` makes of each item of a list that the server does not cut into pages.

        The list may have hundreds of megabytes: items are decoded one at a time, as they arrive,
        and other tasks run in between.
        """
        kept: list[K] = []
        items = ListItems()
        with _translating("GET", path):
            async with asyncio.timeout(LIST_S):
                of_steps = aiohttp.ClientTimeout(connect=self._timeout_s, sock_read=self._timeout_s)
                response = await self._open("GET", path, timeout=of_steps)
                try:
                    async for part in response.content.iter_any():
                        for item in items.add(part):
                            kept.append(keep(_decode(item, kind)))
                            await asyncio.sleep(0)
                finally:
                    response.close()
        kept.extend(map(keep, _decode(items.rest, Page).read(kind)))
        return tuple(kept)

    async def pages(
        self, path: str, *, query: Mapping[str, str] | None = None
    ) -> AsyncIterator[Page]:
        """Raises ExpiredError if it takes too long."""
        token = ""
        while True:
            page = await self.list_page(
                path, query=query or {}, limit=PAGE_SIZE, continue_token=token
            )
            yield page
            token = page.metadata.continue_
            if not token:
                return

    @asynccontextmanager
    async def watch(
        self, path: str, *, query: Mapping[str, str], silence_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Get headers within the timeout, and yield bytes as they arrive.

        Reading raises UnreachableError if the connection breaks, or is silent for `silence_s`.
        """
        target = f"{path}?{urlencode({**query, 'watch': 'true'})}"
        with _translating("GET", path):
            async with asyncio.timeout(self._timeout_s):
                response = await self._open(
                    "GET",
                    target,
                    timeout=aiohttp.ClientTimeout(sock_read=silence_s),
                    read_bufsize=WATCH_BUFFER_BYTES,
                )
        try:
            yield _chunks(path, response, silence_s)
        finally:
            response.close()

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = JSON,
        extra: Mapping[str, str] | None = None,
    ) -> bytes:
        headers = {"Content-Type": content_type} if body is not None else {}
        if extra:
            headers.update(extra)
        with _translating(method, path):
            response = await self._open(method, path, body=body, headers=headers)
            return await response.read()

    async def _open(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("KubernetesClient is used outside its `async with`")
        url = URL(self.credentials.server + path, encoded=True)
        shown = path.partition("?")[0]
        for last in (False, True):
            token = await self._authentication.headers()
            self._use_certificate(self._authentication.certificate)
            response = await self._session.request(
                method,
                url,
                data=body,
                headers={**(headers or {}), **token},
                allow_redirects=False,
                ssl=self._tls or True,
                server_hostname=self.credentials.tls_server_name,
                **options,
            )
            if response.status < 300:
                return response
            answer = await response.read()
            if last or response.status != 401:
                break
            if await self._authentication.headers_after_refusal() == token:
                break
        after = response.headers.get("Retry-After")
        raise parse_error(method, shown, response.status, answer, after)


async def _chunks(
    path: str, response: aiohttp.ClientResponse, silence_s: float
) -> AsyncIterator[bytes]:
    try:
        while chunk := await response.content.readany():
            yield chunk
    except TimeoutError as error:
        why = f"the watch was silent for {silence_s:g} s"
        raise UnreachableError("GET", path, why) from error
    except (aiohttp.ClientError, OSError) as error:
        raise UnreachableError("GET", path, f"the watch broke: {error!r}") from error


@contextmanager
def _translating(method: str, path: str) -> Iterator[None]:
    path = path.partition("?")[0]
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        raise KubeconfigError(
            f"{error.host}:{error.port}",
            f"its certificate is not trusted ({error.certificate_error})",
            "Check certificate-authority and server in the kubeconfig",
        ) from error
    except TimeoutError as error:
        raise UnreachableError(method, path, "it took longer than the timeout") from error
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno or 0
        reason = os.strerror(number) if number > 0 else error.os_error.strerror or repr(error)
        why = f"{error.host}:{error.port} does not respond ({reason})"
        raise UnreachableError(method, path, why) from error
    except (aiohttp.ClientError, OSError) as error:
        raise UnreachableError(method, path, str(error) or repr(error)) from error


def _as(kind: type[T] | None, body: bytes) -> T | bytes:
    return body if kind is None else _decode(body, kind)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise UnexpectedResponseError(f"a response is not a {kind.__name__}: {error}") from error
    except UNDECODABLE as error:
        raise UnavailableError(f"a response is not JSON: {error}") from error
