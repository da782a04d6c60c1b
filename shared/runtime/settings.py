"""Settings: one frozen dataclass per service, read from flags, then the environment.

For example, the field `redis_url` is the flag `--redis-url` and the variable `LEASEHOLD_REDIS_URL`.
Lists are written with commas.
"""

import argparse
import contextlib
import dataclasses
import difflib
import hashlib
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.errors import RequestError
from shared.nats.subjects import user_of
from shared.runtime.variables import (
    MAX_NUMBER,
    UNBOUNDED,
    ValueBounds,
    VariableText,
    argument_reader,
    check_variables,
    own_variables,
    reader_of,
    variable_of,
)

S = TypeVar("S")


def setting(default: Any, text: str, **bounds: Any) -> Any:
    """Numbers are finite and 0 or more unless other bounds are declared; see `ValueBounds`."""
    return field(default=default, metadata={"help": text, "bounds": ValueBounds(**bounds)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentForm:
    names: tuple[str, ...] = ()
    metavar: str = ""
    env: str | None = None
    """The default of its variable in the help, or None without a variable."""
    variable: str = ""
    nargs: str | None = None
    """Of positional arguments."""
    positional: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Flags, with spaces between their names, and the value that each sets."""
    read: Callable[[str], Any] | None = None
    """Raises ValueError or ArgumentTypeError; by default by the type."""
    group: str = ""


def argument(
    default: Any,
    text: str,
    *names: str,
    one_of: Sequence[str] = (),
    at_least: float = 0,
    at_most: float = MAX_NUMBER,
    address: bool = False,
    schemes: Sequence[str] = (),
    **form: Any,
) -> Any:
    """Declare an argument; `...` as default requires it. `form`: see ArgumentForm."""
    bounds = ValueBounds(
        one_of=one_of if isinstance(one_of, tuple) else tuple(one_of),
        at_least=at_least,
        at_most=at_most,
        address=address,
        schemes=tuple(schemes),
    )
    metadata = {"help": text, "bounds": bounds, "form": ArgumentForm(names=names, **form)}
    return field(default=default, metadata=metadata)


def add_arguments(kind: type[Any], group_of: Callable[[str], "argparse._ActionsContainer"]) -> None:
    """Add each argument to its group; a variable is read when it is used."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        form: ArgumentForm = item.metadata["form"]
        group = group_of(form.group)
        options = _options_of(item, hints[item.name])
        flag = "--" + item.name.rstrip("_").replace("_", "-")
        if form.positional:
            group.add_argument(item.name, **options)
        else:
            options["required"] = item.default is ...
            group.add_argument(*form.names, flag, dest=item.name, **options)
        for names, value in form.constants.items():
            about = f"the same as {(*form.names, flag)[0]} {value}" if value else "all"
            group.add_argument(
                *names.split(), action="store_const", const=value, dest=item.name, help=about
            )


def _options_of(item: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    form = item.metadata["form"]
    bounds = item.metadata["bounds"]
    text = item.metadata["help"]
    options: dict[str, Any] = {"default": item.default}
    if form.env is not None:
        variable = form.variable or variable_of(item.name)
        text += f" [{variable}; default: {form.env}]" if form.env else f" [{variable}]"
        fallback = str(item.default) if item.default else ""
        options["default"] = VariableText.read(variable, fallback)
    if hint is bool:
        action = argparse.BooleanOptionalAction if item.default is True else "store_true"
        return {**options, "help": text, "action": action}
    read = form.read or reader_of(hint, dataclasses.replace(bounds, one_of=()))
    if form.metavar or "Path" in str(hint):
        options["metavar"] = form.metavar or "FILE"
    return {
        **options,
        "help": text,
        "type": argument_reader(read),
        "choices": bounds.one_of or None,
        "nargs": form.nargs,
    }


def argument_variables(kind: type[Any]) -> set[str]:
    forms = ((item.name, item.metadata["form"]) for item in dataclasses.fields(kind))
    return {form.variable or variable_of(name) for name, form in forms if form.env is not None}


def from_arguments(kind: type[S], parsed: argparse.Namespace) -> S:
    """Raises RequestError if the arguments contradict."""
    values = {item.name: getattr(parsed, item.name) for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    made = kind(**values)
    if hasattr(made, "check"):
        made.check()
    return made


NATS_SCHEMES = ("nats", "tls", "ws", "wss")
OTLP_SCHEMES = ("http", "https")
LOG_LEVELS = ("debug", "info", "warning", "error")


def log_level_setting() -> Any:
    return setting("info", "debug, info, warning or error", one_of=LOG_LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    nats_url: str = setting("nats://127.0.0.1:4222", "NATS server", schemes=NATS_SCHEMES)
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
    http: str = setting(
        "127.0.0.1:0", "HOST:PORT of /healthz, /readyz, /metrics; port 0: any", address=True
    )
    run_file: Path | None = setting(None, "written once ready: JSON with PID and HTTP address")
    log_level: str = log_level_setting()
    trace_dir: Path | None = setting(None, "write finished spans there, one JSON object a line")
    otlp_endpoint: str = setting(
        "",
        "send spans there by OTLP over gRPC, http://HOST:4317; default: "
        "$OTEL_EXPORTER_OTLP_ENDPOINT",
        schemes=OTLP_SCHEMES,
    )
    trace_ratio: float = setting(1.0, "share of pods whose spans are recorded, 0 to 1", at_most=1)
    instance: str = setting(
        "", "name of this replica in logs and spans; default: service, host and pid"
    )

    def nats_client_credentials(self, service: str, node: str = "") -> ClientCredentials:
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


@dataclass(frozen=True, kw_only=True)
class ApiServerSettings:
    kubeconfig: Path | None = setting(
        None, "kubeconfig; default: $KUBECONFIG, in-cluster, ~/.kube/config"
    )


@dataclass(frozen=True, kw_only=True)
class RedisLogin:
    redis_credentials: Path | None = argument(
        None,
        "file with user:secret for Redis, written by `leasehold credentials --out DIR`",
        group="connection",
        env="",
    )
    redis_ca_file: Path | None = argument(
        None,
        "PEM file with the CA of Redis' certificate; default: the system's CAs",
        group="connection",
        env="",
    )
    redis_certificate_file: Path | None = argument(
        None, "PEM file with the client certificate", group="connection", env=""
    )
    redis_key_file: Path | None = argument(
        None, "PEM file with that certificate's key", group="connection", env=""
    )

    @property
    def redis_client_credentials(self) -> ClientCredentials:
        return ClientCredentials(
            login_file=self.redis_credentials,
            tls=TlsFiles(
                ca=self.redis_ca_file,
                certificate=self.redis_certificate_file,
                key=self.redis_key_file,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings(RedisLogin, ServiceSettings):
    redis_url: str = setting(
        "redis://127.0.0.1:6379",
        "the ledger: Redis or Valkey; rediss:// with TLS; redis+sentinel://HOST,HOST/NAME",
    )


def digest(value: str) -> str:
    """The value may contain a secret."""
    return hashlib.sha256(value.encode()).hexdigest()[:12]


def settings_digests(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: digest(environ[name]) for name in own_variables(environ)}


def load(kind: type[S], program: str, **options: Any) -> S:
    """Load flags, then the environment, then defaults.

    Raises RequestError for an invalid value, for settings that contradict each other (their method
    `check`), for an unknown flag and for a variable whose name is nearly that of a setting.
    """
    loaded: S = load_each((kind,), program, **options)[0]
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
    """Settings of several kinds share flags of the same name."""
    parser = _SettingsParser(
        prog=program,
        description=about,
        epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added: set[str] = set()
    for kind in kinds:
        _add_flags(parser, kind, environ=environ, added=added)
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse(unknown)
    check_variables(environ, {variable_of(name) for name in added})
    return [from_arguments(kind, flags) for kind in kinds]


def load_or_exit(kind: type[S], program: str, *, about: str, examples: Sequence[str] = ()) -> S:
    """Print an invalid value as one line, with exit code 2."""
    with exit_if_invalid(program):
        return load(kind, program, about=about, examples=examples)


@contextlib.contextmanager
def exit_if_invalid(program: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(2)


class _SettingsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message.removeprefix("argument "))

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        written = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(written, self._option_string_actions, n=1)
        meant = f"did you mean {near[0]}?" if near else "--help lists all flags"
        self.error(f"there is no flag {' '.join(unknown)}; {meant}")


def _add_flags(
    parser: argparse.ArgumentParser,
    kind: type[Any],
    *,
    environ: Mapping[str, str],
    added: set[str],
) -> None:
    """Add a flag per field of `kind` that is not in `added`."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if item.name in added:
            continue
        added.add(item.name)
        variable = variable_of(item.name)
        fallback = _default_of(item)
        read = argument_reader(reader_of(hints[item.name], item.metadata.get("bounds", UNBOUNDED)))
        default = fallback
        if variable in environ:
            default = read(VariableText.read(variable, environ=environ))
        text = str(item.metadata.get("help", "")).replace("%", "%%")
        flag = "--" + item.name.replace("_", "-")
        note = f"{text} [{variable}; default: {_shown(fallback)}]"
        if hints[item.name] is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=default, help=note
            )
        else:
            parser.add_argument(flag, type=read, default=default, metavar="VALUE", help=note)


def _default_of(item: "dataclasses.Field[Any]") -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None if item.default is dataclasses.MISSING else item.default


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value in {None, ""} else str(value)
