"""The location of a running Leasehold: from flags, else from the state directory."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from services.cli.program import program
from services.cli.state_dir import State, StateDir, load_state, supervisor_pid
from services.topology import OPERATOR
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.errors import UnavailableError
from shared.model.names import SYSTEM_NAMESPACE

DASHBOARD_SERVICE = f"{SYSTEM_NAMESPACE}/dashboard"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLocation:
    """The servers and directories of one Leasehold."""

    redis_url: str
    """The ledger; empty: only the dashboard's API can be read, with the viewer's permissions."""
    kubeconfig: Path | None
    context: str | None = None
    """The kubeconfig's context; None: its current one."""
    dashboard: str = ""
    """The dashboard's URL, or namespace and name of its Service; see `DashboardReader`."""
    redis_credentials: ClientCredentials = NO_CREDENTIALS
    nats_url: str = ""
    """Empty: usage cannot be requested from the node agents."""
    nats_credentials: ClientCredentials = NO_CREDENTIALS
    traces: Path | None = None
    agents: Path | None = None
    absent: str = ""
    """Where no stack is, as text."""
    hint: str = ""
    """Advice for a server that does not respond."""

    @property
    def service_namespace(self) -> str:
        """The namespace of the dashboard's Service."""
        is_url = "://" in self.dashboard
        return SYSTEM_NAMESPACE if is_url else self.dashboard.partition("/")[0]


def locate(flags: argparse.Namespace) -> ClusterLocation:
    """Return the location that the flags name, else the one in the state directory.

    Without either it is the cluster of the kubeconfig, through the dashboard. A flag that the
    command does not have counts as not set.
    """
    given = _GivenFlags(flags)
    directory = StateDir.at(Path(flags.state))
    if given.text("redis_url"):
        return ClusterLocation(
            redis_url=given.text("redis_url"),
            redis_credentials=given.redis_credentials,
            nats_url=given.text("nats_url"),
            nats_credentials=given.nats_credentials or NO_CREDENTIALS,
            kubeconfig=given.path("kubeconfig"),
            context=given.text("context") or None,
            traces=given.path("trace_dir") or directory.traces,
            agents=given.path("agents"),
        )
    names_cluster = given.text("context") or given.text("dashboard")
    saved = None if names_cluster else load_state(directory)
    if saved is None:
        return ClusterLocation(
            redis_url="",
            kubeconfig=given.path("kubeconfig"),
            context=given.text("context") or None,
            dashboard=given.text("dashboard") or DASHBOARD_SERVICE,
            absent=f"no stack in {directory.root}",
            traces=given.path("trace_dir"),
        )
    return _in_state(directory, saved, given)


class _GivenFlags:
    """The flags of a command; empty for those that it does not have."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags

    def text(self, name: str) -> str:
        return getattr(self.flags, name, "") or ""

    def path(self, name: str) -> Path | None:
        return optional_path(self.text(name))

    @property
    def redis_credentials(self) -> ClientCredentials:
        return redis_credentials_of(self.flags) if "redis_url" in self.flags else NO_CREDENTIALS

    @property
    def nats_credentials(self) -> ClientCredentials | None:
        return nats_credentials_of(self.flags) if "nats_token_file" in self.flags else None


def _in_state(directory: StateDir, saved: State, given: _GivenFlags) -> ClusterLocation:
    """Return the location of a stack of `leasehold up`, with the servers that the flags name."""
    hint = f"nothing runs in {directory.root} now: run `{program()} up`, or name a cluster with "
    return ClusterLocation(
        redis_url=saved.redis_url,
        redis_credentials=_own_or_saved(given.redis_credentials, saved),
        nats_url=given.text("nats_url") or saved.nats_url,
        nats_credentials=given.nats_credentials or saved.nats_client_credentials,
        kubeconfig=optional_path(given.text("kubeconfig") or saved.kubeconfig),
        traces=given.path("trace_dir") or directory.traces,
        agents=given.path("agents") or directory.root / "agents",
        hint="" if supervisor_pid(directory) is not None else f"{hint}--context",
    )


def locate_ledger(flags: argparse.Namespace) -> ClusterLocation:
    """Return the location for a command that reads the ledger itself.

    Raises UnavailableError with what to do if neither flags nor the state directory name one.
    """
    location = locate(flags)
    if location.redis_url:
        return location
    raise UnavailableError(
        f"there is no stack in {StateDir.at(Path(flags.state)).root}, and this command reads the "
        "ledger with an administrator's permissions: in a cluster, run `kubectl -n "
        f"{SYSTEM_NAMESPACE} exec -i deploy/operator -- leasehold {flags.command}`; on one "
        f"machine, run `{program()} up` first, or set --state; --redis-url names another ledger"
    )


def _own_or_saved(own: ClientCredentials, saved: State) -> ClientCredentials:
    if own != NO_CREDENTIALS or not saved.redis_credentials:
        return own
    return ClientCredentials(login_file=Path(saved.redis_credentials))


def redis_credentials_of(flags: argparse.Namespace) -> ClientCredentials:
    """Return the credentials for Redis that the flags of a command name."""
    return ClientCredentials(
        login_file=optional_path(flags.redis_credentials),
        tls=TlsFiles(
            ca=optional_path(flags.redis_ca_file),
            certificate=optional_path(flags.redis_certificate_file),
            key=optional_path(flags.redis_key_file),
        ),
    )


def nats_credentials_of(flags: argparse.Namespace) -> ClientCredentials | None:
    """Return the operator's credentials for NATS that the flags name; None: they name none."""
    login, token, authority = (
        optional_path(text)
        for text in (flags.nats_credentials, flags.nats_token_file, flags.nats_ca_file)
    )
    if not (login or token or authority):
        return None
    return ClientCredentials(
        login_file=login, token_file=token, user=OPERATOR.name, tls=TlsFiles(ca=authority)
    )


def optional_path(text: str) -> Path | None:
    """Return the path; None for empty text."""
    return Path(text) if text else None
