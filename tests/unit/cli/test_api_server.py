"""What the commands say of a kubeconfig or a server that is none, in place of a bug's report."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.cli.api_client import KubernetesApi
from shared.kubernetes.errors import UnexpectedResponseError, UnreachableError
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.kubernetes.types import ApiPod


class LoginPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b'{"items": [1]}' if "listed" in self.path else b"<html>Sign in"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), LoginPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_login_page_in_place_of_an_object_is_named(url: str) -> None:
    server = KubernetesApi(ClusterCredentials(server=url))

    with pytest.raises(UnexpectedResponseError, match="GET /api/v1/namespaces/a/pods/b is not"):
        server.pod("a", "b")
    with pytest.raises(UnexpectedResponseError, match="a proxy with a login page"):
        server.manifest("a", "b")
    for path in ("/pods", "/listed"):
        with pytest.raises(UnexpectedResponseError, match=f"GET {path} is not"):
            list(server.items(path, ApiPod))


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "https://[::1", "https://host:port"])
def test_a_server_that_is_no_url_is_named(url: str) -> None:
    with pytest.raises(KubeconfigError, match="it is not the URL of a server"):
        KubernetesApi(ClusterCredentials(server=url)).send("GET", "/")


@pytest.mark.parametrize("token", ["ключ", "secret\nX-More: 1"])
def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(token: str) -> None:
    server = KubernetesApi(ClusterCredentials(server="http://127.0.0.1:1", token=token))

    with pytest.raises(KubeconfigError, match="has characters that no token has") as refused:
        server.send("GET", "/")

    assert token not in str(refused.value)


def test_a_token_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    credentials = ClusterCredentials(server="http://127.0.0.1:1", token_file=file)

    with pytest.raises(KubeconfigError, match=r"token: cannot be read \(it is no text\)"):
        KubernetesApi(credentials).send("GET", "/")


def test_a_host_that_no_resolver_takes_does_not_respond() -> None:
    server = KubernetesApi(ClusterCredentials(server=f"http://{'x' * 64}.example"))

    with pytest.raises(UnreachableError, match="does not respond"):
        server.send("GET", "/")
