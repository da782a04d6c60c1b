"""Authentication and authorization of HTTP clients: none, a file of tokens, or the API server."""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared.credentials.shares import owner_of
from shared.credentials.turns import Turns
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.tokens import TokenUser, review_token
from shared.kubernetes.types import AccessReview
from shared.model.clock import Clock, ExpiringMap, Rate
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import Namespace

EVERYTHING = "*"
VIEWER_COOKIE = "leasehold_token"
AUTH_MODES = ("none", "tokens", "kube")
CACHE_S = 30.0
"""How long a review by the API server is cached."""
MAX_CACHED = 10_000
ACCEPTED_S = 900.0
"""For this time after it was accepted, a token is reviewed again whatever others send."""
UNKNOWN_TOKENS = 40
"""Reviewed in a second."""
MAX_IN_FLIGHT = 16
MAX_IN_FLIGHT_OF_ONE = 8
REVIEW_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class AccessDeniedError(RequestError):
    def __init__(self, reason: str, *, authenticated: bool) -> None:
        super().__init__(reason)
        self.authenticated = authenticated


def bearer_token(header: str) -> str:
    """Return "" without a token.

    >>> bearer_token("Bearer abc")
    'abc'
    """
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Viewer(Protocol):
    @property
    def name(self) -> str:
        """As grants and logs contain it."""
        ...

    async def visible(self, namespaces: Iterable[Namespace]) -> frozenset[Namespace] | None:
        """Return None for all."""
        ...

    async def may_grant(self, namespace: Namespace) -> bool: ...

    async def may_resize(self, namespace: Namespace, pod: str) -> bool: ...

    async def may_list_events(self, namespace: Namespace) -> bool: ...


class Authenticator(Protocol):
    @property
    def is_anonymous(self) -> bool: ...

    async def authenticate(self, token: str, address: str = "") -> Viewer | None:
        """Return None if the token is unknown.

        Raises UnavailableError if too many unknown tokens come.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScopedViewer:
    scopes: frozenset[str]
    changes: bool = False

    @property
    def name(self) -> str:
        if EVERYTHING in self.scopes:
            return "administrator" if self.changes else "anonymous"
        return f"member of {', '.join(sorted(self.scopes))}"

    async def may_grant(self, namespace: Namespace) -> bool:
        return self.changes

    async def may_resize(self, namespace: Namespace, pod: str) -> bool:
        return self.changes

    async def may_list_events(self, namespace: Namespace) -> bool:
        return True

    async def visible(self, namespaces: Iterable[Namespace]) -> frozenset[Namespace] | None:
        if EVERYTHING in self.scopes:
            return None
        return frozenset(name for name in namespaces if name in self.scopes)


@dataclass(frozen=True, slots=True)
class AnonymousAuthenticator:
    """For loopback addresses: every client sees everything, and changes nothing."""

    of_tokens: Authenticator | None = None
    is_anonymous: bool = True

    async def authenticate(self, token: str, address: str = "") -> Viewer | None:
        if token and self.of_tokens is not None:
            return await self.of_tokens.authenticate(token, address)
        return ScopedViewer(frozenset({EVERYTHING}))


@dataclass(frozen=True, slots=True)
class TokenAuthenticator:
    tokens: tuple[tuple[bytes, str], ...]
    is_anonymous: bool = False

    async def authenticate(self, token: str, address: str = "") -> Viewer | None:
        given = token.strip().encode(errors="surrogateescape")
        scopes = frozenset(
            scope for token, scope in self.tokens if hmac.compare_digest(token, given)
        )
        return ScopedViewer(scopes, changes=EVERYTHING in scopes) if scopes else None


def load_tokens(path: Path) -> TokenAuthenticator:
    """Raises RequestError for an invalid line, without its content."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--tokens {path} cannot be read: {error}") from error
    tokens = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise RequestError(f"--tokens {path}, line {number}: must be TOKEN NAMESPACE")
        tokens.append((words[0].encode(), words[1]))
    return TokenAuthenticator(tuple(tokens))


class KubernetesAuthenticator:
    is_anonymous = False

    def __init__(self, kube: KubernetesClient, clock: Clock) -> None:
        self._kube = kube
        self._users: ExpiringMap[bytes, TokenUser] = ExpiringMap(
            clock.ticks, expires_s=CACHE_S, most=MAX_CACHED
        )
        self._accepted: ExpiringMap[bytes, None] = ExpiringMap(
            clock.ticks, expires_s=ACCEPTED_S, most=MAX_CACHED
        )
        self._unknown: ExpiringMap[bytes, None] = ExpiringMap(
            clock.ticks, expires_s=CACHE_S, most=MAX_CACHED
        )
        """Any number of refused tokens drops no known user."""
        self._strange = Rate(clock.ticks, most=UNKNOWN_TOKENS)
        self._permissions: ExpiringMap[Hashable, bool] = ExpiringMap(
            clock.ticks, expires_s=CACHE_S, most=MAX_CACHED
        )
        self._turns = Turns(MAX_IN_FLIGHT, of_one=MAX_IN_FLIGHT_OF_ONE)
        self._token_reviews = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def authenticate(self, token: str, address: str = "") -> Viewer | None:
        """Raises UnavailableError if the API server does not respond."""
        if not token or not token.isascii():  # the API server issues no others
            return None
        digest = hashlib.sha256(token.encode()).digest()
        user = self._users.get(digest)
        if user is None and digest not in self._unknown:
            if digest not in self._accepted and not self._strange.allows(address):
                raise UnavailableError("many unknown tokens are being tried; retry in a second")
            async with self._token_reviews:
                review = await review_token(self._kube, token)
            if review.authenticated:
                user = review.user
                self._users.set(digest, user)
                self._accepted.set(digest, None)
            else:
                self._unknown.set(digest, None)
                self._accepted.pop(digest)
        return None if user is None else KubernetesViewer(self, user)

    async def may(self, user: TokenUser, **attributes: str) -> bool:
        """`attributes` are `resourceAttributes` of a review."""
        key = (repr(user), *sorted(attributes.items()))
        allowed = self._permissions.get(key)
        if allowed is None:
            async with self._turns.turn(owner_of(user.username)):
                allowed = await self._review(user, attributes)
            self._permissions.set(key, allowed)
        return allowed

    async def _review(self, user: TokenUser, attributes: Mapping[str, str]) -> bool:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "resourceAttributes": dict(attributes),
                "user": user.username,
                "uid": user.uid,
                "groups": user.groups,
                "extra": user.extra,
            },
        }
        return (await self._kube.create(REVIEW_ACCESS, body, AccessReview)).status.allowed


@dataclass(frozen=True, slots=True)
class KubernetesViewer:
    authenticator: KubernetesAuthenticator
    user: TokenUser

    @property
    def name(self) -> str:
        return self.user.username

    async def may_grant(self, namespace: Namespace) -> bool:
        of_grants = {"group": "leasehold.dev", "resource": "gpubudgets", "subresource": "grants"}
        return await self.authenticator.may(self.user, verb="create", name=namespace, **of_grants)

    async def may_resize(self, namespace: Namespace, pod: str) -> bool:
        return await self._may_on_pods("patch", namespace, subresource="resize", name=pod)

    async def may_list_events(self, namespace: Namespace) -> bool:
        events = {"resource": "events", "version": "v1"}
        return await self.authenticator.may(self.user, verb="list", namespace=namespace, **events)

    async def visible(self, namespaces: Iterable[Namespace]) -> frozenset[Namespace] | None:
        """Review for all namespaces at once, then for each."""
        if await self._may_on_pods("get", ""):
            return None
        names = sorted(name for name in set(namespaces) if name)
        allowed = await asyncio.gather(*(self._may_on_pods("get", name) for name in names))
        return frozenset(name for name, may in zip(names, allowed, strict=True) if may)

    async def _may_on_pods(self, verb: str, namespace: str, **more: str) -> bool:
        attributes = {"resource": "pods", "version": "v1", "namespace": namespace, **more}
        return await self.authenticator.may(self.user, verb=verb, **attributes)


def make_token(path: Path, log: Callable[[str], None]) -> None:
    """Write a token unless the file exists. Raises RequestError if it cannot be written."""
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"{secrets.token_urlsafe(32)} {EVERYTHING}\n")
    except FileExistsError:
        return
    except OSError as error:
        raise RequestError(
            f"cannot write a token to {path} ({error.strerror}): set --tokens FILE, or --state-dir"
        ) from error
    log(f"{path} contains a token for all namespaces")


def is_loopback(address: str) -> bool:
    """Accept `HOST:PORT`, or a host without a port.

    >>> is_loopback("127.0.0.1:8080"), is_loopback("0.0.0.0:8080")
    (True, False)
    """
    host = host_of(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """Return the host of `HOST:PORT`, `HOST` or `[V6]:PORT`.

    >>> host_of("[::1]:8080")
    '::1'
    """
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
