"""The auth service: it reconciles secrets and Redis' users, and authorizes NATS clients."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client import Counter, Gauge

from services.auth import auth_callout, ca_rotation, root_secret
from services.auth.auth_callout import AuthorizationRefusedError, TokenReviewer
from services.auth.ca_rotation import NOTHING_OBSERVED, TRUSTED, Rotation, RotationProgress
from services.auth.locked_out_agents import LockedOutAgents
from services.auth.managed_servers import ManagedServers
from services.auth.nats_users import AUTHORIZATION_S, NatsUser, service_users
from services.auth.nkeys import TokenIssuer
from services.auth.object_store import RootSecretStore
from services.auth.root_secret import AUTH, files_of_servers
from services.topology import SERVICES
from shared.credentials.turns import TooManyRequestsError, Turns
from shared.model.clock import Clock, ExpiringMap
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.runtime.service import loops

REQUESTS = Counter(
    "leasehold_auth_requests", "Authorization requests of NATS, by outcome.", ["outcome"]
)
EXPIRATION = Gauge(
    "leasehold_auth_certificate_expiration_timestamp_seconds",
    "When the certificate of NATS and Redis expires.",
)
logger = logging.getLogger(__name__)

MOST_REVIEWS = 10_000
AT_ONCE = 16
AT_ONCE_OF_HOST = 4
"""Of tokens that were not accepted lately, which cost their sender nothing."""
MOST_WAITING_OF_HOST = 256
"""A server that masquerades its clients sends those of many agents."""
UNREAD_S = 1.0
"""Pause of the update of Redis' users until the secrets have been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthTiming:
    reconcile_s: float = 60.0
    """Interval of comparisons of all secrets and users, in case a change was missed."""
    propagation_s: float = 300.0
    """After this time, kubelets have written changed Secrets and ConfigMaps to pods' files."""
    redis_users_s: float = 5.0
    """Interval of updates of Redis' users: after a failover, Redis has only those of its file."""
    connection_s: int = 4 * 3600
    """After this, NATS ends a connection, and the client must be authorized again."""
    authorized_s: float = 30.0
    """How long a review of a token that the API server knows is reused."""
    accepted_s: float = 3600.0
    """The life of a token; for this time after it was accepted, it waits for no others of its
    host."""
    refused_s: float = 5.0
    """How long a refusal is reused: a refused client retries continually."""


class AuthService:
    """Any number of replicas may run: every step is idempotent."""

    def __init__(
        self,
        secret_store: RootSecretStore,
        servers: ManagedServers,
        review: TokenReviewer,
        clock: Clock,
        timing: AuthTiming | None = None,
    ) -> None:
        self.secret_store = secret_store
        self.namespaces = secret_store.namespaces
        self.servers = servers
        self.settings = servers.settings
        self.review = review
        self.clock = clock
        self.timing = timing or AuthTiming()
        self.expires_at = 0.0
        self._issuer: TokenIssuer | None = None
        self._redis_users: Sequence[Sequence[str]] = ()
        self._observed = NOTHING_OBSERVED
        self._written_files = (b"", b"")
        """As this replica has read them from the derived objects."""
        self._unchanged_since = 0.0
        self._reloaded_files = (b"", b"")
        self._authorized: ExpiringMap[bytes, NatsUser] = ExpiringMap(
            clock.ticks, expires_s=self.timing.authorized_s, most=MOST_REVIEWS
        )
        self._refused: ExpiringMap[bytes, AuthorizationRefusedError] = ExpiringMap(
            clock.ticks, expires_s=self.timing.refused_s, most=MOST_REVIEWS
        )
        """Any number of refused tokens drops no review of a good one."""
        self._accepted: ExpiringMap[bytes, None] = ExpiringMap(
            clock.ticks, expires_s=self.timing.accepted_s, most=MOST_REVIEWS
        )
        self._locked_out = LockedOutAgents(clock.ticks)
        self._turns = Turns(AT_ONCE, of_one=AT_ONCE_OF_HOST, most_waiting=MOST_WAITING_OF_HOST)

    def unready_reason(self) -> str | None:
        return None if self._issuer else "the secrets were not read yet"

    async def reconcile(self) -> Mapping[str, bytes]:
        while True:
            stored, version = await self.secret_store.load()
            data = self._complete(stored)
            if data == stored:
                break
            try:
                await self.secret_store.save(data, version)
            except ConflictError:
                continue  # another replica was faster; its secrets are used
            created = sorted(key for key in data if data[key] != stored.get(key))
            logger.info("created: %s", ", ".join(created))
        is_changed = files_of_servers(data) != self._written_files
        for managed in root_secret.managed_objects(
            data, self._nats_user(), self.settings.nats_files
        ):
            if await self.secret_store.apply(managed):
                is_changed = True
                logger.info("%s updated", managed.name)
        if is_changed:
            self._written_files = files_of_servers(data)
            self._unchanged_since = self.clock.ticks()
        await asyncio.to_thread(self.servers.write_files, root_secret.own_files(data))
        self._issuer = TokenIssuer(data[root_secret.ISSUER])
        self.expires_at = root_secret.expires_at(data)
        self._redis_users = root_secret.redis_user_rules(data)
        return data

    def _complete(self, stored: Mapping[str, bytes]) -> dict[str, bytes]:
        try:
            return root_secret.complete(
                stored,
                self.settings.names,
                self._now(),
                secrets.token_bytes,
                namespace=self.namespaces.system,
                observed=self._observed,
            )
        except RequestError as error:
            raise RequestError(
                f"Secret {self.namespaces.system}/{self.secret_store.name}: {error}: remove that "
                "entry of the Secret, and it is created again"
            ) from error

    @loops(every_s=lambda auth: auth.timing.reconcile_s)
    async def reconcile_all(self) -> None:
        """Reconcile until no step of a rotation is due."""
        while await self.update_servers(await self.reconcile()):
            pass

    @loops(every_s=lambda auth: UNREAD_S if auth.unready_reason() else auth.timing.redis_users_s)
    async def update_redis_users(self) -> None:
        await self.servers.set_users(self._redis_users)

    async def update_servers(self, data: Mapping[str, bytes]) -> bool:
        """Return whether a new CA can take its next step. Raises UnavailableError."""
        unchanged_s = self.clock.ticks() - self._unchanged_since
        if unchanged_s < self.timing.propagation_s:
            return False
        if not root_secret.should_reload(data, self._now()):
            return False
        rotation = ca_rotation.rotation(data)
        if rotation is Rotation.REPLACING and await self._is_verified(data):
            return True
        if self._reloaded_files != files_of_servers(data):
            await self.servers.reload()
            self._reloaded_files = files_of_servers(data)
            logger.info("NATS and Redis have loaded the new certificates")
        if rotation is Rotation.TRUSTING:
            self._observed = RotationProgress(loaded=data[TRUSTED])
            return True
        return rotation is Rotation.REPLACING and await self._is_verified(data)

    async def _is_verified(self, data: Mapping[str, bytes]) -> bool:
        """If a server serves another certificate, reload them later."""
        try:
            await self.servers.verify(data["server.crt"])
        except UnavailableError as error:
            if self._reloaded_files == files_of_servers(data):
                logger.warning("a server does not use its new certificate yet: %s", error)
                self._reloaded_files = (b"", b"")
                self._unchanged_since = self.clock.ticks()
            return False
        self._observed = RotationProgress(verified=data["ca.crt"])
        return True

    async def authorize(self, request: bytes) -> bytes:
        """Raises RequestError if the request is not from a NATS server, else UnavailableError."""
        parsed = auth_callout.parse_request(request.decode(errors="replace"))
        issuer = self._issuer
        now_s = round(self.clock.now())
        if issuer is None:
            raise ConflictError("the secrets were not read yet")
        try:
            async with asyncio.timeout(AUTHORIZATION_S):
                user = auth_callout.user_of_client(
                    await self._user_of_token(parsed.token, parsed.host),
                    parsed.user,
                    combined_scheduler=self.settings.combined_scheduler,
                )
            self._locked_out.check(user.name)
        except TimeoutError as error:
            raise UnavailableError(f"no review within {AUTHORIZATION_S} s") from error
        except (AuthorizationRefusedError, TooManyRequestsError) as error:
            REQUESTS.labels("refused").inc()
            logger.debug("NATS refuses %s: %s", parsed.name or "an unnamed client", error)
            return auth_callout.encode_refusal(issuer, parsed, str(error), now_s=now_s).encode()
        REQUESTS.labels("authorized").inc()
        return auth_callout.encode_grant(
            issuer, parsed, user, now_s=now_s, life_s=self.timing.connection_s
        ).encode()

    def note_flood(self, user: bytes) -> None:
        self._locked_out.note(user.decode(errors="replace"))

    async def _user_of_token(self, token: str, host: str) -> NatsUser:
        """Tokens that were accepted lately queue by themselves, others with those of their host.

        Raises TooManyRequestsError if many of the host wait.
        """
        if not token:
            raise AuthorizationRefusedError("the connection has no token")
        digest = hashlib.sha256(token.encode()).digest()
        review = self._last_review(digest)
        if review is None:
            owner = f"token {digest.hex()}" if digest in self._accepted else f"host {host}"
            async with self._turns.turn(owner):
                review = self._last_review(digest) or await self._review(token, digest)
        if isinstance(review, AuthorizationRefusedError):
            raise AuthorizationRefusedError(str(review))
        return review

    def _last_review(self, digest: bytes) -> NatsUser | AuthorizationRefusedError | None:
        return self._authorized.get(digest) or self._refused.get(digest)

    async def _review(self, token: str, digest: bytes) -> NatsUser | AuthorizationRefusedError:
        try:
            user = auth_callout.user_of_token(await self.review(token), self.namespaces)
        except AuthorizationRefusedError as error:
            logger.warning("NATS refuses a token: %s", error)
            self._refused.set(digest, error)
            self._accepted.pop(digest)
            return error
        self._authorized.set(digest, user)
        self._accepted.set(digest, None)
        return user

    def _nats_user(self) -> NatsUser:
        return next(user for user in service_users(SERVICES, []) if user.name == AUTH)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now(), UTC)
