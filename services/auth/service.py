"""The auth service: keeps secrets and certificates, tells Redis of its users, and answers NATS."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from services.auth import auth_callout
from services.auth import secrets as kept
from services.auth.auth_callout import RefusedError, Reviewed
from services.auth.nats_users import BusUser, users_of
from services.auth.nkeys import Issuer
from services.auth.secrets import AUTH, Handout
from services.topology import SERVICES
from shared.model.clock import Clock
from shared.model.errors import ConflictError, LeaseholdError
from shared.runtime.service import Role, loops

logger = logging.getLogger(__name__)

LOOK_S = 60.0
USERS_S = 5.0
"""How often Redis is told of its users: a server that takes over knows only those of its file."""
PAUSE_S = 2.0
LIFE_S = 4 * 3600
"""So long a connection to NATS lasts at most before it is asked for anew."""
REMEMBER_S = 30.0
"""So long the API server is believed about a token that it knew."""
REFUSED_S = 5.0
"""So long one that it did not know is not asked about again: who is refused tries on and on."""
REMEMBERED = 10_000


class Keeping(Protocol):
    """The objects in which all is kept and handed out."""

    async def load(self) -> tuple[Mapping[str, bytes], str]:
        """Return what is kept, and its version."""
        ...

    async def save(self, data: Mapping[str, bytes], version: str) -> None:
        """Keep it. Raises ConflictError if another was quicker."""
        ...

    async def hand_out(self, handout: Handout) -> bool:
        """Give servers and services theirs; say whether it was new to them."""
        ...


class Servers(Protocol):
    """NATS and Redis, as those see them who look after them."""

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write our own files."""
        ...

    async def set_users(self, users: Sequence[Sequence[str]]) -> None:
        """Tell Redis who may what."""
        ...

    async def reload(self) -> None:
        """Have both read their certificate anew."""
        ...


class Tally(Protocol):
    """Counts who came."""

    def count(self, outcome: str) -> None:
        """Note somebody who was let in, or refused."""
        ...


Review = Callable[[str], Awaitable[Reviewed]]
"""Says whose token it is; raises RefusedError if nobody's, UnavailableError if it cannot tell."""


class AuthService:
    """Any number of replicas may run: what they do twice is the same both times."""

    def __init__(  # noqa: PLR0917 - each is another part
        self,
        keeping: Keeping,
        servers: Servers,
        review: Review,
        clock: Clock,
        namespace: str,
        names: Sequence[str],
        files: str,
        roles: Mapping[str, tuple[Role, ...]],
        tally: Tally,
    ) -> None:
        self.keeping = keeping
        self.servers = servers
        self.review = review
        self.clock = clock
        self.namespace = namespace
        self.names = tuple(names)
        self.files = files
        self.roles = roles
        self.tally = tally
        self.ends_at = 0.0
        self._issuer: Issuer | None = None
        self._users: Sequence[Sequence[str]] = ()
        self._reloaded = b""
        self._known: dict[bytes, tuple[float, BusUser | RefusedError]] = {}

    def missing(self) -> str | None:
        """Say what keeps anybody from being let in, or None."""
        return None if self._issuer else "the secrets were not read yet"

    async def make(self) -> Mapping[str, bytes]:
        """Make what is missing, hand it out, and write our own files; return what is kept."""
        while True:
            stored, version = await self.keeping.load()
            whole = kept.completed(stored, self.names, self._now(), secrets.token_bytes)
            if whole == stored:
                break
            try:
                await self.keeping.save(whole, version)
            except ConflictError:
                continue  # another replica was quicker: its secrets are ours
            made = sorted(key for key in whole if whole[key] != stored.get(key))
            logger.info("made anew: %s", ", ".join(made))
        for handout in kept.handouts(whole, self._user(), self.files):
            if await self.keeping.hand_out(handout):
                logger.info("%s holds what it should now", handout.name)
        await asyncio.to_thread(self.servers.write, kept.own_files(whole))
        self._issuer, self.ends_at = Issuer(whole[kept.ISSUER]), kept.ends_at(whole)
        self._users = kept.users_at_redis(whole)
        return whole

    @loops
    async def keep(self) -> None:
        """Look after everything, again and again."""
        said = ""
        while True:
            pause_s, fault = LOOK_S, ""
            try:
                whole = await self.make()
                await self._show_anew(whole)
            except LeaseholdError as error:
                pause_s, fault = PAUSE_S, str(error)
            if fault and fault != said:
                logger.warning("looked after again every %g s: %s", PAUSE_S, fault)
            said = fault
            await self.clock.sleep(pause_s)

    @loops
    async def keep_users(self) -> None:
        """Tell Redis who may what, again and again."""
        said = ""
        while True:
            pause_s, fault = USERS_S if self._users else PAUSE_S, ""
            try:
                await self.servers.set_users(self._users)
            except LeaseholdError as error:
                pause_s, fault = PAUSE_S, str(error)
            if fault and fault != said:
                logger.warning("told again every %g s: %s", PAUSE_S, fault)
            said = fault
            await self.clock.sleep(pause_s)

    async def _show_anew(self, whole: Mapping[str, bytes]) -> None:
        if self._reloaded == whole["server.crt"] or not kept.is_to_reload(whole, self._now()):
            return
        await self.servers.reload()
        self._reloaded = whole["server.crt"]
        logger.info("NATS and Redis show the new certificate")

    async def answer(self, request: bytes) -> bytes:
        """Answer a server of NATS that asks whom to let in.

        Raises RequestError for what no server asks, UnavailableError while nothing is known.
        """
        caller = auth_callout.read_caller(request.decode(errors="replace"))
        issuer, now_s = self._issuer, round(self.clock.now())
        if issuer is None:
            raise ConflictError("the secrets were not read yet")
        try:
            user = await self._user_of(caller.token)
        except RefusedError as error:
            self.tally.count("refused")
            logger.debug("%s is not let in at NATS: %s", caller.name or "somebody", error)
            return auth_callout.refusal(issuer, caller, str(error), now_s=now_s).encode()
        self.tally.count("admitted")
        return auth_callout.admission(issuer, caller, user, now_s=now_s, life_s=LIFE_S).encode()

    async def _user_of(self, token: str) -> BusUser:
        """Ask whose token it is; what was heard of one just now is heard again."""
        if not token:
            raise RefusedError("it shows no token")
        digest, now = hashlib.sha256(token.encode()).digest(), self.clock.now()
        until, known = self._known.get(digest, (0.0, None))
        if known is None or until <= now:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            known = await self._asked(token)
            refused = isinstance(known, RefusedError)
            self._known[digest] = (now + (REFUSED_S if refused else REMEMBER_S), known)
        if isinstance(known, RefusedError):
            raise RefusedError(str(known))
        return known

    async def _asked(self, token: str) -> BusUser | RefusedError:
        try:
            reviewed = await self.review(token)
            return auth_callout.user_for(reviewed, self.namespace, SERVICES, self.roles)
        except RefusedError as error:
            logger.warning("a token is refused at NATS: %s", error)
            return error

    def _user(self) -> BusUser:
        return next(u for u in users_of(SERVICES, self.roles, []) if u.name == AUTH)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now(), UTC)
