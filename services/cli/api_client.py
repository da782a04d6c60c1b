"""The API of Leasehold, as the commands use it, and the pods of the API server beside it.

The API server passes requests on to the API, where the user of the kubeconfig has its own rights.
"""

import http.client
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlencode, urlsplit

import msgspec

from services.cli.arguments import ClusterArguments, StateArguments
from services.cli.state_dir import optional_path, stack_of, supervisor_pid
from services.cli.terminal import program
from shared.kubernetes.errors import (
    ForbiddenError,
    KubernetesError,
    NotFoundError,
    OverloadedError,
    RequestRejectedError,
    UnexpectedResponseError,
    UnreachableError,
    parse_error,
)
from shared.kubernetes.kubeconfig import (
    NO_KUBECONFIG,
    ClusterCredentials,
    KubeconfigError,
    load_credentials,
    tls_context,
)
from shared.kubernetes.paths import pod_path
from shared.kubernetes.types import ApiObject, ApiPod, ObjectMeta
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError, UnavailableError
from shared.model.names import SYSTEM_NAMESPACE

if TYPE_CHECKING:
    from services.cli.pod_summary import PodSummary

T = TypeVar("T")
APISERVICE = "v1beta1.visibility.leasehold.dev"
GROUP = "/apis/visibility.leasehold.dev/v1beta1"
VIEWS = f"{GROUP}/views"
"""There, the names of /api/v1 have colons instead of slashes."""
TIMEOUT_S = 30.0
"""A slow API server is waited for; a command without a reply ends."""
JSON = {"Accept": "application/json", "Content-Type": "application/json"}


class NothingFoundError(LeaseholdError):
    pass


class RefusedError(RequestError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class KubernetesApi:
    """Each request is on a connection of its own."""

    def __init__(self, credentials: ClusterCredentials, advice: str = "") -> None:
        self.credentials = credentials
        self._advice = advice or (
            "`kubectl version` shows whether it does; --context or KUBECONFIG names another cluster"
        )

    @cached_property
    def _complete(self) -> ClusterCredentials:
        """Return the credentials with what the plugin of the kubeconfig returns."""
        credentials = self.credentials
        if credentials.token_file is not None:
            try:
                return replace(credentials, token=credentials.token_file.read_text().strip())
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is no text"
                raise KubeconfigError(
                    str(credentials.token_file), f"cannot be read ({reason})", "Check the path"
                ) from error
        if credentials.exec_plugin is None:
            return credentials
        status = credentials.exec_plugin.run()
        return replace(
            credentials,
            token=status.token or credentials.token,
            client_cert_pem=status.client_certificate_data or credentials.client_cert_pem,
            client_key_pem=status.client_key_data or credentials.client_key_pem,
        )

    def exchange(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] = JSON
    ) -> tuple[int, bytes]:
        """Raises UnreachableError without a response."""
        credentials = self._complete
        server, connection = _connection(credentials)
        token = credentials.token or ""
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        if not (token.isascii() and token.isprintable()):
            raise KubeconfigError(
                server.netloc,
                "the token of its user has characters that no token has",
                "Correct the token in the kubeconfig, or what its plugin returns",
            )
        content = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, f"{server.path}{path}", content, {**headers, **bearer})
            response = connection.getresponse()
            return response.status, response.read()
        except ssl.SSLCertVerificationError as error:
            raise KubeconfigError(
                server.netloc,
                f"its certificate is not trusted ({error.verify_message})",
                "Check certificate-authority and server in the kubeconfig",
            ) from error
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            shown = path.partition("?")[0]
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            why = f"{credentials.server} does not respond ({reason}): {self._advice}"
            raise UnreachableError(method, shown, why) from error
        finally:
            connection.close()

    def send(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] = JSON
    ) -> bytes:
        """Raises KubernetesError for a response that is no success."""
        status, content = self.exchange(method, path, body, headers)
        if status < 300:
            return content
        raise _kubernetes_error(method, path, status, content)

    def read(self, path: str, kind: type[T]) -> T:
        """Raises KubernetesError; UnexpectedResponseError for what is no such object."""
        content = self.send("GET", path)
        try:
            return msgspec.json.decode(content, type=kind)
        except UNDECODABLE as error:
            raise _unexpected(path, error) from error

    def pod(self, namespace: str, name: str) -> "PodSummary":
        """Raises NothingFoundError."""
        from services.cli.pod_summary import summary_of

        try:
            return summary_of(self.read(pod_path(namespace, name), ApiPod))
        except NotFoundError as error:
            raise NothingFoundError(
                f"there is no pod {namespace}/{name}; `kubectl get pods -A` lists them, -n names "
                "another namespace"
            ) from error

    def manifest(self, namespace: str, name: str) -> Mapping[str, Any]:
        """Return a pod with all its fields."""
        return self.read(pod_path(namespace, name), dict[str, Any])

    def selected(self, path: str, selector: str = "") -> Iterator[ObjectMeta]:
        query = {"labelSelector": selector} if selector else {}
        try:
            for item in self.items(path, ApiObject, query):
                yield item.metadata
        except RequestRejectedError as error:
            if error.response.code != 400:
                raise
            raise RequestError(
                f"-l {selector!r} selects no labels ({error.response.message}): write a=b,c!=d"
            ) from error

    def items(
        self, path: str, kind: type[T], query: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[T]:
        chosen = {"limit": "500", **query}
        while True:
            page = self.read(f"{path}?{urlencode(chosen)}", dict[str, Any])
            try:
                items = msgspec.convert(page.get("items") or (), tuple[kind, ...])  # type: ignore[valid-type]
                metadata = msgspec.convert(page.get("metadata") or {}, dict[str, Any])
            except UNDECODABLE as error:
                raise _unexpected(path, error) from error
            yield from items
            chosen["continue"] = metadata.get("continue", "")
            if not chosen["continue"]:
                return


class ApiClient:
    """The cluster is the one of the flags, else that of the state directory or kubeconfig."""

    def __init__(self, flags: ClusterArguments) -> None:
        directory, stack = stack_of(flags)
        saved = None if flags.context else stack
        elsewhere = flags.context or flags.kubeconfig
        if saved is None and flags.state != StateArguments.state and not elsewhere:
            raise UnavailableError(
                f"there is nothing to read: no stack is in {directory.root}; run `{program()} up` "
                "with the same --state, or omit the flag to use the cluster of the kubeconfig"
            )
        self._root = directory.root
        self._kubeconfig = flags.kubeconfig
        self._context = flags.context or None
        self._hint = ""
        if saved is not None:
            self._kubeconfig = flags.kubeconfig or optional_path(saved.kubeconfig)
            if supervisor_pid(directory) is None:
                advice = f"run `{program()} up`, or name a cluster with --context"
                self._hint = f"nothing runs in {directory.root} now: {advice}"

    @property
    def namespace(self) -> str:
        try:
            return load_credentials(self._kubeconfig, context=self._context).namespace
        except KubeconfigError:
            return "default"

    def get(self, path: str, kind: type[T], **query: str) -> T:
        """For example, `api.get("/api/v1/gpus", GpusView, node="gpu-1")`.

        Raises RequestError or UnavailableError with what to do.
        """
        chosen = {name: text for name, text in query.items() if text}
        return self._decoded("GET", f"{path}?{urlencode(chosen)}" if chosen else path, None, kind)

    def post(self, path: str, body: object, kind: type[T]) -> T:
        """Raises RequestError or UnavailableError with what to do."""
        return self._decoded("POST", path, body, kind)

    @cached_property
    def server(self) -> KubernetesApi:
        """Raises UnavailableError if the kubeconfig names no API server."""
        try:
            credentials = load_credentials(self._kubeconfig, context=self._context)
        except KubeconfigError as error:
            if self._hint:
                raise UnavailableError(f"{self._hint} ({error.what})") from error
            if error.where != NO_KUBECONFIG:
                raise
            raise UnavailableError(
                f"there is nothing to read: run `{program()} up` for a simulated cluster, or name "
                "a cluster with --kubeconfig or KUBECONFIG "
                f"(no stack in {self._root}; {error.what})"
            ) from error
        return KubernetesApi(credentials, self._hint)

    def _decoded(self, method: str, path: str, body: object, kind: type[T]) -> T:
        try:
            content = self._content(method, path, body)
        except UnavailableError as error:
            if self._hint and self._hint not in str(error):
                raise UnavailableError(f"{self._hint} ({error})") from error
            raise
        try:
            return msgspec.json.decode(content, type=kind)
        except UNDECODABLE as error:
            raise RequestError(
                "the response of the API is not what this version of the command reads: use the "
                f"command of the cluster's version ({error})"
            ) from error

    def _content(self, method: str, path: str, body: object) -> bytes:
        name, _, query = path.removeprefix("/api/v1/").partition("?")
        view = f"{VIEWS}/{name.replace('/', ':')}"
        status, content = self.server.exchange(method, f"{view}?{query}" if query else view, body)
        if status < 300:
            return content
        reason = _reason_in(content)
        if reason and status == 503:
            raise UnavailableError(reason)
        if reason:
            raise RefusedError(status, reason)
        raise _explained(_kubernetes_error(method, path, status, content))


def _explained(error: KubernetesError) -> Exception:
    match error:
        case NotFoundError():
            return UnavailableError(
                f"this cluster has no API of Leasehold of this version: install it ({error})"
            )
        case ForbiddenError():
            return RequestError(
                "your account may not use Leasehold's API: an administrator can bind the "
                f"ClusterRole leasehold-commands to it ({error.response})"
            )
        case OverloadedError():
            return UnavailableError(
                f"no replica of the API is ready: `kubectl get pods -n {SYSTEM_NAMESPACE}` and "
                f"`kubectl get apiservices {APISERVICE}` show why ({error.response})"
            )
    return error


def _connection(
    credentials: ClusterCredentials,
) -> tuple[SplitResult, http.client.HTTPConnection]:
    try:
        server = urlsplit(credentials.server)
        if server.scheme == "https":
            return server, _TlsConnection(server.netloc, credentials)
        return server, http.client.HTTPConnection(server.netloc, timeout=TIMEOUT_S)
    except (ValueError, http.client.InvalidURL) as error:
        raise KubeconfigError(
            credentials.server,
            f"it is not the URL of a server ({error})",
            "Correct server in the kubeconfig",
        ) from error


class _TlsConnection(http.client.HTTPSConnection):
    """Its certificate may be for another name than that of the URL."""

    def __init__(self, host: str, credentials: ClusterCredentials) -> None:
        self._tls = tls_context(credentials)
        self._server_name = credentials.tls_server_name
        super().__init__(host, timeout=TIMEOUT_S, context=self._tls)

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name or self.host)


def _unexpected(path: str, error: Exception) -> UnexpectedResponseError:
    shown = path.partition("?")[0]
    return UnexpectedResponseError(
        f"the response to GET {shown} is not what an API server returns ({error}): check that "
        "server in the kubeconfig is one, not a proxy with a login page"
    )


class _Refusal(msgspec.Struct, frozen=True):
    error: str = ""


def _reason_in(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_Refusal).error
    except UNDECODABLE:
        return ""


def _kubernetes_error(method: str, path: str, status: int, content: bytes) -> KubernetesError:
    return parse_error(method, path.partition("?")[0], status, content)
