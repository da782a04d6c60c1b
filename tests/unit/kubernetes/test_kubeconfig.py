"""Kubeconfig files, the credential plugins that they name, and the errors of both."""

import base64
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.kubernetes.client import RequestAuthentication
from shared.kubernetes.kubeconfig import (
    API_VERSIONS,
    ClusterCredentials,
    ExecPluginError,
    KubeconfigError,
    load_credentials,
    read_kubeconfig,
)

PLUGIN = {"apiVersion": API_VERSIONS[0], "command": "aws"}
PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def write(
    path: Path,
    *,
    cluster: dict[str, object] | None = None,
    user: dict[str, object] | None = None,
    top: dict[str, object] | None = None,
) -> Path:
    """Write a kubeconfig with one context named `main`."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "main",
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://one:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {}}],
        **(top or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_secrets_do_not_show_in_logs(tmp_path: Path) -> None:
    user: dict[str, object] = {
        "token": "hush-token",
        "client-certificate-data": encoded(PEM),
        "client-key-data": encoded("hush-key"),
    }

    shown = repr(read_kubeconfig(write(tmp_path / "config", user=user)))

    assert "hush" not in shown


WRAPPED = "\n".join(encoded(PEM)[at : at + 20] for at in range(0, len(encoded(PEM)), 20))
TEAM = {"cluster": "c", "user": "u", "namespace": "team"}
OTHER = {"cluster": "d", "user": "u"}
READ: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "server, user and namespace": (
        {"user": {"token": "t-1"}, "top": {"contexts": [{"name": "main", "context": TEAM}]}},
        {"server": "https://one:6443", "token": "t-1", "namespace": "team"},
    ),
    "data precede files": (
        {
            "cluster": {
                "certificate-authority-data": encoded(PEM),
                "certificate-authority": "absent.crt",
            },
            "user": {
                "client-certificate-data": encoded("cert"),
                "client-key-data": encoded("key"),
            },
        },
        {"ca_pem": PEM, "client_cert_pem": "cert", "client_key_pem": "key"},
    ),
    "data wrapped over lines": (
        {"cluster": {"certificate-authority-data": WRAPPED}},
        {"ca_pem": PEM},
    ),
    "a token file precedes a token": (
        {"user": {"token": "old", "tokenFile": "/run/token"}},
        {"token": None, "token_file": Path("/run/token")},
    ),
    "how TLS is verified": (
        {"cluster": {"insecure-skip-tls-verify": True, "tls-server-name": "inner"}},
        {"insecure_skip_tls_verify": True, "tls_server_name": "inner"},
    ),
}


@pytest.mark.parametrize(("written", "fields"), READ.values(), ids=READ)
def test_a_kubeconfig_is_read(
    tmp_path: Path, written: dict[str, Any], fields: dict[str, object]
) -> None:
    credentials = read_kubeconfig(write(tmp_path / "config", **written))

    assert {name: getattr(credentials, name) for name in fields} == fields


def test_another_context_can_be_chosen(tmp_path: Path) -> None:
    two = {"name": "d", "cluster": {"server": "https://two:6443"}}
    top: dict[str, object] = {"contexts": [{"name": "other", "context": OTHER}], "clusters": [two]}

    found = read_kubeconfig(write(tmp_path / "config", top=top), context="other")

    assert found.server == "https://two:6443"


def test_relative_paths_start_at_the_files_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    cluster: dict[str, object] = {"certificate-authority": "pki/ca.crt"}
    path = write(tmp_path / "config", cluster=cluster, user={"tokenFile": "token"})
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki" / "ca.crt").write_text(PEM)

    credentials = read_kubeconfig(path)

    assert credentials.ca_pem == PEM
    assert credentials.token_file == tmp_path / "token"


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"exec": {"command": "aws"}}, "has apiVersion None and command aws. Set"),
        ({"exec": {**PLUGIN, "args": "token"}}, "args that are not a list"),
        ({"exec": {**PLUGIN, "env": {"A": "b"}}}, "env that are not a list"),
        ({"exec": {**PLUGIN, "env": ["A=b"]}}, "env is not a mapping"),
        ({"exec": {**PLUGIN, "env": [{"name": "A"}]}}, "env without a name or a value"),
        ({"auth-provider": {"name": "gcp"}}, "an auth-provider plugin"),
        ({"username": "a", "password": "b"}, "basic authentication"),
        ({"as": "root"}, "impersonation"),
        ({"client-certificate-data": encoded(PEM)}, "only one of client-certificate"),
        ({"client-key": "absent.key", "client-certificate-data": "AA"}, "not base64 PEM|read"),
        ({"token": 5}, "a token that is not text"),
        ({"token": "abc\n"}, "a token with spaces or control characters"),
        ({"token": "abc def"}, "a token with spaces or control characters"),
        ({"client-certificate-data": "%%%", "client-key-data": "AAAA"}, "not base64"),
    ],
)
def test_an_unsupported_user_is_refused(
    tmp_path: Path, user: dict[str, object], message: str
) -> None:
    path = write(tmp_path / "config", user=user)

    with pytest.raises(KubeconfigError, match=message):
        read_kubeconfig(path)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"current-context": ""}, r"no current-context is set \(it has main\)"),
        ({"current-context": "lost"}, r"no context 'lost' \(it has main\)"),
        ({"clusters": []}, r"no cluster 'c' \(it has none\)"),
        ({"users": None}, r"no user 'u' \(it has none\)"),
        ({"clusters": [{"name": "c", "cluster": {}}]}, "cluster 'c' has no server"),
        ({"clusters": [{"name": "c", "cluster": {"server": "x", "proxy-url": "y"}}]}, "proxy-url"),
        ({"clusters": {"c": {}}}, "clusters that are not a list"),
        ({"contexts": ["main"]}, "contexts is not a mapping"),
    ],
)
def test_an_inconsistent_kubeconfig_is_refused_with_the_reason(
    tmp_path: Path, top: dict[str, object], message: str
) -> None:
    path = write(tmp_path / "config", top=top)

    with pytest.raises(KubeconfigError, match=message) as caught:
        read_kubeconfig(path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "just words", "- a list"])
def test_a_file_that_is_not_a_kubeconfig_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)

    with pytest.raises(KubeconfigError):
        read_kubeconfig(path)


def test_a_missing_kubeconfig_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(KubeconfigError, match="absent: cannot be read"):
        load_credentials(tmp_path / "absent", environ={})


@pytest.mark.parametrize(
    ("named", "listed", "found"),
    [("one", "two", "one"), (None, "absent:two", "two"), (None, None, "home")],
)
def test_a_named_file_precedes_the_environment_and_that_the_home_directory(
    tmp_path: Path, named: str | None, listed: str | None, found: str
) -> None:
    for name, path in (("one", "one"), ("two", "two"), ("home", ".kube/config")):
        write(tmp_path / path, cluster={"server": f"https://{name}"})
    paths = ":".join(str(tmp_path / each) for each in (listed or "").split(":"))

    credentials = load_credentials(
        tmp_path / named if named else None,
        environ={"KUBECONFIG": paths} if listed else {},
        home=tmp_path,
        service_account=tmp_path / "none",
    )

    assert credentials.server == f"https://{found}"


def account(folder: Path) -> Path:
    folder.mkdir()
    (folder / "token").write_text("rotating")
    (folder / "ca.crt").write_text(PEM)
    (folder / "namespace").write_text("team\n")
    return folder


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd::1", "https://[fd::1]:443")]
)
def test_a_pod_uses_its_service_account(tmp_path: Path, host: str, server: str) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
    folder = account(tmp_path / "sa")

    credentials = load_credentials(None, environ=environ, service_account=folder, home=tmp_path)

    assert (credentials.server, credentials.namespace) == (server, "team")
    assert (credentials.ca_pem, credentials.token_file) == (PEM, folder / "token")


def test_the_error_without_any_kubeconfig_names_every_path_tried(tmp_path: Path) -> None:
    environ = {"KUBECONFIG": "/absent/config"}

    with pytest.raises(KubeconfigError) as caught:
        load_credentials(None, environ=environ, home=tmp_path, service_account=tmp_path / "sa")

    assert "/absent/config" in str(caught.value)
    assert str(tmp_path / "sa") in str(caught.value)
    assert str(tmp_path / ".kube" / "config") in str(caught.value)


V1 = API_VERSIONS[0]


def kubeconfig(path: Path, plugin: Mapping[str, object], *, context: str = "main") -> Path:
    named = {"name": context, "context": {"cluster": "c", "user": "u"}}
    return write(
        path,
        cluster={"server": "https://one:6443", "tls-server-name": "inner"},
        user={"exec": {"apiVersion": V1, **plugin}},
        top={"current-context": context, "contexts": [named]},
    )


def program(folder: Path, output: str) -> str:
    """Write a plugin that saves its arguments and environment, and return its relative path."""
    path = folder / "plugin"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"seen = open({str(folder / 'seen')!r}, 'a')\n"
        "seen.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')\n"
        f"{output}\n"
    )
    path.chmod(0o755)
    return "./plugin"


def runs(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


def credential(token: str = "", **status: str) -> str:
    body = {"apiVersion": V1, "kind": "ExecCredential", "status": {"token": token, **status}}
    return f"print({json.dumps(body)!r})"


def authentication(credentials: ClusterCredentials) -> RequestAuthentication:
    return RequestAuthentication(credentials, clock=time.monotonic)


async def test_a_plugin_gets_its_arguments_variables_and_cluster_and_its_token_is_sent(
    tmp_path: Path,
) -> None:
    plugin = {
        "command": program(tmp_path, credential("t-1")),
        "args": ["get-token", "--cluster=a"],
        "env": [{"name": "PROFILE", "value": "team"}],
        "provideClusterInfo": True,
        "interactiveMode": "Never",
    }
    used = authentication(read_kubeconfig(kubeconfig(tmp_path / "config", plugin)))

    headers = await used.headers(), await used.headers()

    assert headers == ({"Authorization": "Bearer t-1"},) * 2
    ((arguments, environment),) = runs(tmp_path)
    assert arguments == ["get-token", "--cluster=a"]
    assert environment["PROFILE"] == "team"
    info = json.loads(environment["KUBERNETES_EXEC_INFO"])
    assert (info["apiVersion"], info["kind"]) == (V1, "ExecCredential")
    assert info["spec"] == {
        "interactive": False,
        "cluster": {"server": "https://one:6443", "tls-server-name": "inner"},
    }


@pytest.mark.parametrize(("expires_in_s", "count"), [(3600, 1), (-60, 2)])
async def test_a_plugin_runs_again_once_its_credential_has_expired(
    tmp_path: Path, expires_in_s: int, count: int
) -> None:
    expires = (datetime.now(UTC) + timedelta(seconds=expires_in_s)).isoformat()
    output = credential("t-1", expirationTimestamp=expires)
    config = kubeconfig(tmp_path / "config", {"command": program(tmp_path, output)})
    used = authentication(read_kubeconfig(config))

    await used.headers()
    await used.headers()

    assert len(runs(tmp_path)) == count
    await used.headers_after_refusal()
    assert len(runs(tmp_path)) == count + 1


async def test_a_client_certificate_of_a_plugin_is_used(tmp_path: Path) -> None:
    output = credential(clientCertificateData="CERT", clientKeyData="KEY")
    config = kubeconfig(tmp_path / "config", {"command": program(tmp_path, output)})
    used = authentication(read_kubeconfig(config))

    assert await used.headers() == {}
    assert used.certificate == ("CERT", "KEY")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("print('no json')", "no ExecCredential"),
        ("sys.exit(3)", "failed with exit code 3"),
        (credential(), "neither a token nor a certificate"),
        (credential("abc\n"), "a token with spaces or control characters"),
        (credential(clientCertificateData="CERT"), "only one of certificate and key"),
        ('print(\'{"kind": "Pod"}\')', "wrote Pod of no apiVersion, expected ExecCredential"),
    ],
)
async def test_other_output_is_refused_with_the_name_of_the_plugin(
    tmp_path: Path, output: str, message: str
) -> None:
    config = kubeconfig(tmp_path / "config", {"command": program(tmp_path, output)})

    with pytest.raises(ExecPluginError, match=message) as refused:
        await authentication(read_kubeconfig(config)).headers()

    assert str(tmp_path / "plugin") in str(refused.value)


async def test_a_missing_plugin_is_refused_with_its_hint(tmp_path: Path) -> None:
    plugin = {"command": "no-such-plugin", "installHint": "Install it with apt."}
    config = kubeconfig(tmp_path / "config", plugin)

    with pytest.raises(ExecPluginError, match=r"cannot be run .*Install it with apt\."):
        await authentication(read_kubeconfig(config)).headers()


def test_the_file_with_the_context_is_used(tmp_path: Path) -> None:
    first = kubeconfig(tmp_path / "first", {"command": "one"}, context="a")
    second = kubeconfig(tmp_path / "second", {"command": "two"}, context="b")

    credentials = load_credentials(
        None, environ={"KUBECONFIG": f"{first}:{second}"}, context="b", home=tmp_path
    )

    assert credentials.exec_plugin is not None
    assert credentials.exec_plugin.command == "two"


@pytest.mark.parametrize("content", [b"", b"one\ntwo\n", b"\xff\xfe", b"one\x01"])
async def test_a_file_that_is_not_one_token_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    credentials = ClusterCredentials(server="https://one:6443", token_file=file)

    fault = r"token: cannot be read \(it is not (text|one token)\)"
    with pytest.raises(KubeconfigError, match=fault):
        await RequestAuthentication(credentials, clock=time.monotonic).headers()
