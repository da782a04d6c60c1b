"""What the auth service is told."""

from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import RequestError
from shared.runtime.settings import LedgerSettings, setting

ABOUT = """Makes the secrets and certificates of NATS and Redis at the first start, keeps them, and
answers NATS whose token it was shown: a service's, or the agent's of one node.

It runs in a cluster, beside Secrets that are installed empty. Any number of replicas may run."""

EXAMPLES = (
    "python -m services.auth --secret leasehold-system/auth --names nats,redis \\",
    "    --nats-url nats://nats:4222 --redis-url rediss://redis:6379/0 --state-dir /run/auth",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings(LedgerSettings):
    """Flags of `python -m services.auth`."""

    kubeconfig: Path | None = setting(
        None, "kubeconfig; default: $KUBECONFIG, in-cluster, ~/.kube/config"
    )
    secret: str = setting(
        "leasehold-system/auth", "NAMESPACE/NAME of the Secret in which all of it is kept"
    )
    names: tuple[str, ...] = setting(("nats", "redis"), "names in the servers' certificate")
    state_dir: Path = setting(
        Path("/run/auth"), "our own secrets are written here, and best kept in memory"
    )
    nats_files: str = setting("/etc/nats", "directory of NATS' certificate, as its server sees it")
    redis_files: str = setting(
        "/etc/redis",
        "directory of Redis' certificate, as its server sees it; empty: it has its own",
    )
    audience: str = setting("leasehold-nats", "for whom the tokens are that NATS is shown")

    @property
    def secret_name(self) -> tuple[str, str]:
        """Namespace and name of the Secret. Raises RequestError if it is not both."""
        namespace, _, name = self.secret.partition("/")
        if not namespace or not name:
            raise RequestError(f"--secret {self.secret!r}: NAMESPACE/NAME is wanted")
        return namespace, name
