"""Exec credential plugins: what they receive, and what of their output is refused."""

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from shared.kubernetes.client import RequestAuthentication
from shared.kubernetes.kubeconfig import (
    API_VERSIONS,
    ClusterCredentials,
    ExecPluginError,
    load_credentials,
    read_kubeconfig,
)
from tests.unit.kubernetes.test_kubeconfig import write

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
