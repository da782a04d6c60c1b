"""Loads credentials for the API server: a kubeconfig file or the service account of the pod."""

import base64
import binascii
import json
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import msgspec

from shared.kubernetes.strict_yaml import load_document
from shared.model.errors import UNDECODABLE, RequestError

API_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
EXEC_INFO = "KUBERNETES_EXEC_INFO"
MAX_RUN_S = 300.0
"""A plugin may ask its user to log in with a browser."""


class ExecPluginError(RequestError):
    pass


class ExecCredentialStatus(msgspec.Struct, frozen=True, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str = ""
    kind: str = ""
    status: ExecCredentialStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecPlugin:
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    api_version: str = API_VERSIONS[0]
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    cluster: Mapping[str, object] | None = None
    """For plugins with `provideClusterInfo`."""

    def run(self) -> ExecCredentialStatus:
        """Raises ExecPluginError.

        Standard error is shown, and the terminal may be read unless the mode is Never.
        """
        is_interactive = self.interactive_mode != "Never" and sys.stdin.isatty()
        if self.interactive_mode == "Always" and not is_interactive:
            raise ExecPluginError(f"{self.command} needs a terminal (interactiveMode: Always)")
        spec: dict[str, object] = {"interactive": is_interactive}
        if self.cluster is not None:
            spec["cluster"] = self.cluster
        info = {"apiVersion": self.api_version, "kind": "ExecCredential", "spec": spec}
        try:
            done = subprocess.run(  # noqa: S603 - the kubeconfig names it, as for kubectl
                [self.command, *self.args],
                env={**os.environ, **self.env, EXEC_INFO: json.dumps(info)},
                stdin=None if is_interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=MAX_RUN_S,
                check=False,
            )
        except OSError as error:
            hint = f". {self.install_hint.strip()}" if self.install_hint else ""
            raise self._error(
                f"cannot be run ({error.strerror}): install it, or correct `exec` in the "
                f"kubeconfig{hint}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise self._error(f"did not end within {MAX_RUN_S:g} s") from error
        if done.returncode:
            raise self._error(
                f"failed with exit code {done.returncode}: run it, or `kubectl get pods`, to see "
                "why"
            )
        return self._parse(done.stdout)

    def _parse(self, output: bytes) -> ExecCredentialStatus:
        try:
            credential = msgspec.json.decode(output, type=_ExecCredential)
        except UNDECODABLE as error:
            raise self._error(f"wrote what is no ExecCredential: {error}") from error
        status = credential.status
        if credential.kind != "ExecCredential" or credential.api_version != self.api_version:
            raise self._error(
                f"wrote {credential.kind or 'no kind'} of "
                f"{credential.api_version or 'no apiVersion'}, expected ExecCredential of "
                f"{self.api_version}"
            )
        if status is None or not (status.token or status.client_certificate_data):
            raise self._error("returned neither a token nor a certificate")
        if status.token and not is_token(status.token):
            raise self._error("returned a token with spaces or control characters")
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise self._error("returned only one of certificate and key")
        return status

    def _error(self, fault: str) -> ExecPluginError:
        return ExecPluginError(f"the credential plugin {self.command} {fault}")


def is_token(text: str) -> bool:
    """Return whether a header may have it, which excludes line breaks."""
    return text.isprintable() and text.split() == [text]


def resolve_command(command: str, folder: Path) -> str:
    """A relative path is relative to the kubeconfig's folder.

    >>> resolve_command("bin/login", Path("/home/u/.kube"))
    '/home/u/.kube/bin/login'
    """
    if os.sep in command and not Path(command).is_absolute():
        return str(folder / command)
    return command


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
UNSUPPORTED_USER_FIELDS: Mapping[str, str] = {
    "auth-provider": "an auth-provider plugin",
    "username": "basic authentication",
    "as": "impersonation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCredentials:
    """Secrets are not in `repr`."""

    server: str
    """Without a trailing slash; may contain a path."""
    namespace: str = "default"
    ca_pem: str | None = None
    """None for the CAs of the system."""
    client_cert_pem: str | None = None
    client_key_pem: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """In-cluster tokens rotate."""
    exec_plugin: ExecPlugin | None = field(default=None, repr=False)
    """Used for what the fields above do not contain."""
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool = False


NO_KUBECONFIG = "no kubeconfig"


class KubeconfigError(RequestError):
    def __init__(self, where: str, what: str, next_step: str) -> None:
        super().__init__(f"{where}: {what}. {next_step}")
        self.where = where
        self.what = what


def tls_context(credentials: ClusterCredentials) -> ssl.SSLContext:
    """Raises KubeconfigError if a certificate or key is invalid."""
    try:
        context = ssl.create_default_context(cadata=credentials.ca_pem)
        if credentials.insecure_skip_tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Kubernetes' own CAs often lack the key identifiers that the strict mode requires.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if credentials.client_cert_pem and credentials.client_key_pem:
            _load_client_certificate(
                context, credentials.client_cert_pem, credentials.client_key_pem
            )
    except ssl.SSLError as error:
        raise KubeconfigError(
            credentials.server,
            f"its certificate authority or client certificate is unusable ({error})",
            "Write the kubeconfig anew",
        ) from error
    return context


def _load_client_certificate(context: ssl.SSLContext, cert_pem: str, key_pem: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{cert_pem}\n{key_pem}")
        file.flush()
        # Without a passphrase, OpenSSL asks for that of an encrypted key on the terminal.
        context.load_cert_chain(file.name, password="")


def load_credentials(
    kubeconfig: Path | None,
    *,
    environ: Mapping[str, str] = os.environ,
    context: str | None = None,
    home: Path | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> ClusterCredentials:
    """Load credentials from the first source that applies, like kubectl.

    In this order: `kubeconfig`; the first existing file of `$KUBECONFIG` (that has the context, if
    one is given); the pod's service account, without a context; `~/.kube/config`. Raises
    KubeconfigError if none applies.
    """
    if kubeconfig is not None:
        return read_kubeconfig(kubeconfig, context=context)
    listed = [Path(part) for part in environ.get("KUBECONFIG", "").split(":") if part]
    file = _file_with(context, listed)
    if file is not None:
        return read_kubeconfig(file, context=context)
    if (
        context is None
        and "KUBERNETES_SERVICE_HOST" in environ
        and (service_account / "token").exists()
    ):
        return in_cluster(environ, service_account)
    standard = (home or Path.home()) / ".kube" / "config"
    if standard.exists():
        return read_kubeconfig(standard, context=context)
    tried = [f"$KUBECONFIG ({', '.join(map(str, listed)) or 'not set'})"]
    tried += [f"{service_account} (not in a pod)", f"{standard} (no such file)"]
    raise KubeconfigError(
        NO_KUBECONFIG,
        f"tried {'; '.join(tried)}",
        "Pass --kubeconfig PATH, set KUBECONFIG, or run `leasehold up`, which writes one",
    )


def _file_with(context: str | None, listed: Sequence[Path]) -> Path | None:
    existing = [path for path in listed if path.exists()]
    named = (path for path in existing if context is not None and context in context_names(path))
    return next(named, existing[0] if existing else None)


def in_cluster(environ: Mapping[str, str], service_account: Path) -> ClusterCredentials:
    host = environ["KUBERNETES_SERVICE_HOST"]
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    namespace_file = service_account / "namespace"
    return ClusterCredentials(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=_text(namespace_file).strip() if namespace_file.exists() else "default",
        ca_pem=_text(service_account / "ca.crt"),
        token_file=service_account / "token",
    )


def read_kubeconfig(path: Path, *, context: str | None = None) -> ClusterCredentials:
    """Relative paths are relative to the file."""
    config = _load(path)
    name = context or config.text("current-context")
    if not name:
        raise KubeconfigError(
            str(path),
            f"no current-context is set (it has {config.listed('contexts')})",
            "Choose one with `kubectl config use-context NAME`",
        )
    chosen = config.named("contexts", name, "context")
    cluster = config.named("clusters", chosen.text("cluster") or "", "cluster")
    user_name = chosen.text("user")
    user = config.named("users", user_name, "user") if user_name else _Section(path, "user", {})
    return _credentials(cluster, user, namespace=chosen.text("namespace") or "default")


def context_names(path: Path) -> list[str]:
    return _load(path).names("contexts")


def _load(path: Path) -> "_Section":
    try:
        document = load_document(_text(path))
    except ValueError as error:
        raise KubeconfigError(str(path), f"not valid YAML: {error}", "Correct the file") from error
    return _Section(path, "the file", _mapping(path, "the file", document))


def _credentials(cluster: "_Section", user: "_Section", *, namespace: str) -> ClusterCredentials:
    server = cluster.text("server")
    if not server:
        raise cluster.error("has no server", "Add `server: https://HOST:PORT`")
    if cluster.text("proxy-url"):
        raise cluster.error("has proxy-url, which is not supported", "Remove proxy-url")
    for key, what in UNSUPPORTED_USER_FIELDS.items():
        if key in user.fields:
            raise user.error(
                f"uses {what}, which is not supported",
                "Use a token or client certificate; `kubectl create token ACCOUNT` prints a token",
            )
    client_cert = user.pem("client-certificate")
    client_key = user.pem("client-key")
    if (client_cert is None) != (client_key is None):
        raise user.error("has only one of client-certificate and client-key", "Set both")
    token_file = user.text("tokenFile")
    token = None if token_file else user.text("token")
    if token is not None and not is_token(token):
        raise user.error("has a token with spaces or control characters", "Correct the token")
    return ClusterCredentials(
        server=server.rstrip("/"),
        namespace=namespace,
        ca_pem=cluster.pem("certificate-authority"),
        client_cert_pem=client_cert,
        client_key_pem=client_key,
        token=token,
        token_file=user.folder / token_file if token_file else None,
        exec_plugin=_exec_plugin(cluster, user),
        tls_server_name=cluster.text("tls-server-name"),
        insecure_skip_tls_verify=cluster.fields.get("insecure-skip-tls-verify") is True,
    )


def _exec_plugin(cluster: "_Section", user: "_Section") -> ExecPlugin | None:
    if user.fields.get("exec") is None:
        return None
    plugin = user.section("exec")
    command = plugin.text("command")
    version = plugin.text("apiVersion")
    if not command or version not in API_VERSIONS:
        raise plugin.error(
            f"has apiVersion {version} and command {command}",
            f"Set a command, and one of the versions {', '.join(API_VERSIONS)}",
        )
    arguments = plugin.fields.get("args") or []
    if not isinstance(arguments, list):
        raise plugin.error("has args that are not a list", "Correct the file")
    variables = plugin.entries("env")
    if not all(variable.keys() >= {"name", "value"} for variable in variables):
        raise plugin.error("has env without a name or a value", "Correct the file")
    provided = plugin.fields.get("provideClusterInfo") is True
    return ExecPlugin(
        command=resolve_command(command, user.folder),
        args=tuple(map(str, arguments)),
        env={str(variable["name"]): str(variable["value"]) for variable in variables},
        api_version=version,
        install_hint=plugin.text("installHint") or "",
        interactive_mode=plugin.text("interactiveMode") or "IfAvailable",
        cluster=_cluster_info(cluster) if provided else None,
    )


def _cluster_info(cluster: "_Section") -> Mapping[str, object]:
    authority = cluster.pem("certificate-authority")
    data = base64.b64encode(authority.encode()).decode() if authority else None
    info = {
        "server": cluster.text("server"),
        "tls-server-name": cluster.text("tls-server-name"),
        "insecure-skip-tls-verify": cluster.fields.get("insecure-skip-tls-verify"),
        "certificate-authority-data": data,
    }
    return {key: value for key, value in info.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Section:
    path: Path
    title: str
    fields: Mapping[str, object]

    @property
    def folder(self) -> Path:
        return self.path.parent

    def error(self, what: str, next_step: str) -> KubeconfigError:
        return KubeconfigError(str(self.path), f"{self.title} {what}", next_step)

    def text(self, key: str) -> str | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"has a {key} that is not text", f"Correct {key}")
        return value or None

    def section(self, key: str) -> "_Section":
        title = f"{self.title}, {key}:"
        return _Section(self.path, title, _mapping(self.path, title, self.fields.get(key)))

    def pem(self, key: str) -> str | None:
        """Read `<key>-data`, else the file `<key>`, if any."""
        data = self.text(f"{key}-data")
        if data is not None:
            try:
                return base64.b64decode("".join(data.split()), validate=True).decode("ascii")
            except (binascii.Error, UnicodeDecodeError) as error:
                raise self.error(
                    f"has a {key}-data that is not base64 PEM", "Correct it"
                ) from error
        file = self.text(key)
        return None if file is None else _text(self.folder / file)

    def names(self, key: str) -> list[str]:
        return [str(entry.get("name")) for entry in self.entries(key)]

    def listed(self, key: str) -> str:
        return ", ".join(self.names(key)) or "none"

    def named(self, key: str, name: str, inner: str) -> "_Section":
        for entry in self.entries(key):
            if entry.get("name") == name:
                title = f"{inner} {name!r}"
                return _Section(self.path, title, _mapping(self.path, title, entry.get(inner)))
        raise self.error(
            f"has no {inner} {name!r} (it has {self.listed(key)})",
            "Correct the name, or write the file anew",
        )

    def entries(self, key: str) -> list[Mapping[str, object]]:
        entries = self.fields.get(key) or []
        if not isinstance(entries, list):
            raise self.error(f"has {key} that are not a list", "Correct the file")
        return [_mapping(self.path, key, entry) for entry in entries]


def _mapping(path: Path, title: str, value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise KubeconfigError(str(path), f"{title} is not a mapping", "Correct the file")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise KubeconfigError(
            str(path), f"cannot be read ({reason})", "Check the path and its permissions"
        ) from error
