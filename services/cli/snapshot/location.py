"""The location of a running Leasehold: from flags, else from the state directory."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from services.cli.state_dir import State, StateDir, load_state, supervisor_pid
from services.topology import OPERATOR
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.errors import UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLocation:
    """The servers and directories of one Leasehold."""

    redis_url: str
    kubeconfig: Path | None
    redis_credentials: ClientCredentials = NO_CREDENTIALS
    nats_url: str = ""
    """Empty: usage cannot be requested from the node agents."""
    nats_credentials: ClientCredentials = NO_CREDENTIALS
    traces: Path | None = None
    agents: Path | None = None
    hint: str = ""
    """Advice for a server that does not respond."""


def locate(
    state: str,
    *,
    redis_url: str = "",
    redis_credentials: ClientCredentials = NO_CREDENTIALS,
    nats_url: str = "",
    nats_credentials: ClientCredentials | None = None,
    kubeconfig: str = "",
    trace_dir: str = "",
    agents: str = "",
) -> ClusterLocation:
    """Return the location that the flags name, else the one in the state directory.

    Raises UnavailableError if neither names one.
    """
    directory = StateDir.at(Path(state))
    saved = load_state(directory)
    if redis_url:
        return ClusterLocation(
            redis_url=redis_url,
            redis_credentials=redis_credentials,
            nats_url=nats_url,
            nats_credentials=nats_credentials or NO_CREDENTIALS,
            kubeconfig=optional_path(kubeconfig),
            traces=optional_path(trace_dir) or directory.traces,
            agents=optional_path(agents),
        )
    if saved is None:
        raise UnavailableError(
            f"no stack in {directory.root}: run `leasehold up`, or set --state, or --redis-url "
            "and --kubeconfig of a cluster"
        )
    runs = supervisor_pid(directory) is not None
    return ClusterLocation(
        redis_url=saved.redis_url,
        redis_credentials=_own_or_saved(redis_credentials, saved),
        nats_url=nats_url or saved.nats_url,
        nats_credentials=nats_credentials or saved.nats_client_credentials,
        kubeconfig=optional_path(kubeconfig or saved.kubeconfig),
        traces=optional_path(trace_dir) or directory.traces,
        agents=optional_path(agents) or directory.root / "agents",
        hint="" if runs else f"nothing runs in {directory.root} now: run `leasehold up`",
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
