"""Settings of the auth service."""

from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import RequestError
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from shared.runtime.settings import ApiServerSettings, LedgerSettings, setting

ABOUT = """Makes the secrets and certificates of NATS and Redis, renews them, and authorizes each
connection to NATS by the token of its service account: that of a service, or of one node's agent.

It runs in a cluster, with Secrets that are installed empty. Any number of replicas may run."""

EXAMPLES = (
    "python -m services.auth --secret leasehold-system/auth --names nats,redis \\",
    "    --nats-url nats://nats:4222 --redis-url rediss://redis:6379/0 --state-dir /run/auth",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings(ApiServerSettings, LedgerSettings):
    secret: str = setting(
        f"{SYSTEM_NAMESPACE}/auth", "NAMESPACE/NAME of the Secret that stores all secrets"
    )
    agents_namespace: str = setting(
        AGENTS_NAMESPACE, "namespace of the node agents; all other services are in that of --secret"
    )
    names: tuple[str, ...] = setting(("nats", "redis"), "names in the servers' certificate")
    state_dir: Path = setting(
        Path("/run/auth"), "directory of the service's own credentials, preferably in memory"
    )
    nats_files: str = setting("/etc/nats", "directory of NATS' certificate, as its server sees it")
    redis_files: str = setting(
        "/etc/redis",
        "directory of Redis' certificate, as its server sees it; empty: not managed",
    )
    audience: str = setting("leasehold-nats", "audience of the tokens that clients send to NATS")
    combined_scheduler: bool = setting(
        False,
        "watcher, placer and planner run in the process of the binder (services.scheduler): the "
        "token of its account also authorizes them, by the user that the client names",
    )

    def check(self) -> None:
        _ = self.secret_name

    @property
    def secret_name(self) -> tuple[str, str]:
        namespace, _, name = self.secret.partition("/")
        if not namespace or not name:
            raise RequestError(f"--secret {self.secret!r} must be NAMESPACE/NAME")
        return namespace, name
