"""Settings: one frozen dataclass per service, read from flags, then the environment.

A field `redis_url` is the flag `--redis-url` and the variable `LEASEHOLD_REDIS_URL`. Lists are
written with commas.
"""

import argparse
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.claim import DraMode
from shared.model.errors import RequestError
from shared.nats.subjects import user_of

PREFIX = "LEASEHOLD_"


def setting(default: Any, text: str) -> Any:
    """Declare a setting with its default and its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings of every service."""

    nats_url: str = setting("nats://127.0.0.1:4222", "NATS server")
    nats_credentials: Path | None = setting(
        None,
        "file with user:secret for NATS, written by `leasehold credentials --out DIR`",
    )
    nats_token_file: Path | None = setting(
        None, "instead: file with a token of this service's account, for the auth service to review"
    )
    nats_ca_file: Path | None = setting(
        None, "PEM file with the CA of NATS' certificate; requires TLS"
    )
    nats_certificate_file: Path | None = setting(None, "PEM file with the client certificate")
    nats_key_file: Path | None = setting(None, "PEM file with that certificate's key")
    http: str = setting("127.0.0.1:0", "HOST:PORT of /healthz, /readyz, /metrics; port 0: any")
    run_file: Path | None = setting(None, "written once ready: JSON with PID and HTTP address")
    dra: DraMode = setting(
        DraMode.OFF,
        "ResourceClaims of the driver gpu.leasehold.dev: off, or conditions (leased before their "
        "pods are bound, by binding conditions; requires Kubernetes 1.36)",
    )
    log_level: str = setting("info", "debug, info, warning or error")
    trace_dir: Path | None = setting(None, "write finished spans there, one JSON object a line")
    otlp_endpoint: str = setting(
        "",
        "send spans there by OTLP over gRPC, http://HOST:4317; default: "
        "$OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    trace_ratio: float = setting(1.0, "share of pods whose spans are recorded, 0 to 1")
    instance: str = setting(
        "", "name of this replica in logs and spans; default: service, host and pid"
    )

    def nats_client_credentials(self, service: str, node: str = "") -> ClientCredentials:
        """Return the NATS credentials of this service, or of its replica on a node."""
        return ClientCredentials(
            login_file=self.nats_credentials,
            token_file=self.nats_token_file,
            user=user_of(service, node),
            tls=TlsFiles(
                ca=self.nats_ca_file,
                certificate=self.nats_certificate_file,
                key=self.nats_key_file,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings(ServiceSettings):
    """Settings of services that use the ledger."""

    redis_url: str = setting(
        "redis://127.0.0.1:6379",
        "the ledger: Redis or Valkey; rediss:// with TLS; redis+sentinel://HOST,HOST/NAME",
    )
    redis_credentials: Path | None = setting(
        None,
        "file with user:secret for Redis, written by `leasehold credentials --out DIR`",
    )
    redis_ca_file: Path | None = setting(
        None, "PEM file with the CA of Redis' certificate; default: the system's CAs"
    )
    redis_certificate_file: Path | None = setting(None, "PEM file with the client certificate")
    redis_key_file: Path | None = setting(None, "PEM file with that certificate's key")

    @property
    def redis_client_credentials(self) -> ClientCredentials:
        """The Redis credentials of this service."""
        return ClientCredentials(
            login_file=self.redis_credentials,
            tls=TlsFiles(
                ca=self.redis_ca_file,
                certificate=self.redis_certificate_file,
                key=self.redis_key_file,
            ),
        )


S = TypeVar("S")


def load(
    kind: type[S],
    program: str,
    *,
    about: str,
    examples: Sequence[str] = (),
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> S:
    """Load settings of `kind`: flags, then the environment, then defaults.

    Raises RequestError with the name and value of an invalid variable; an invalid flag ends the
    process with code 2 and argparse's message.
    """
    (settings,) = load_each(
        (kind,), program, about=about, examples=examples, argv=argv, environ=environ
    )
    loaded: S = settings
    return loaded


def load_each(
    kinds: Sequence[type[Any]],
    program: str,
    *,
    about: str,
    examples: Sequence[str] = (),
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Any]:
    """Load settings of several kinds, as `load` does; they share flags of the same name."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=about,
        epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known: set[str] = set()
    for kind in kinds:
        add_flags(parser, kind, environ=environ, known=known)
    flags = parser.parse_args(argv)
    return [from_flags(kind, flags) for kind in kinds]


def load_or_exit(kind: type[S], program: str, *, about: str, examples: Sequence[str] = ()) -> S:
    """Load settings; an invalid value is printed as one line, with exit code 2."""
    try:
        return load(kind, program, about=about, examples=examples)
    except RequestError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(2)


def add_flags(
    parser: argparse.ArgumentParser,
    kind: type[Any],
    *,
    environ: Mapping[str, str] = os.environ,
    known: set[str] | None = None,
) -> None:
    """Add one flag per field of `kind`, unless it is `known`; the environment has its default."""
    known = set() if known is None else known
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if item.name in known:
            continue
        known.add(item.name)
        variable = PREFIX + item.name.upper()
        parse = reader_of(hints[item.name])
        fallback = _default_of(item)
        default = fallback
        if variable in environ:
            default = _from_environment(parse, variable, environ[variable])
        text = str(item.metadata.get("help", "")).replace("%", "%%")
        flag = "--" + item.name.replace("_", "-")
        note = f"{text} [{variable}; default: {_shown(fallback)}]"
        if parse is parse_bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=default, help=note
            )
        else:
            parser.add_argument(
                flag, type=_for_argparse(parse), default=default, metavar="VALUE", help=note
            )


def from_flags(kind: type[S], flags: argparse.Namespace) -> S:
    """Build settings of `kind` from parsed flags."""
    return kind(
        **{item.name: getattr(flags, item.name) for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    )


def parse_bool(text: str) -> bool:
    """Parse a boolean in its usual spellings. Raises ValueError for others."""
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off", ""}:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list; blanks and empty entries are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def reader_of(hint: Any) -> Callable[[str], Any]:
    """Return the function that parses text as a value of type `hint`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return parse_list
    if hint is bool:
        return parse_bool
    reader: Callable[[str], Any] = hint
    return reader


def _default_of(item: "dataclasses.Field[Any]") -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None if item.default is dataclasses.MISSING else item.default


def _from_environment(parse: Callable[[str], Any], variable: str, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise RequestError(f"{variable}={text!r}: {error}") from error


def _for_argparse(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, RequestError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value in {None, ""} else str(value)
