"""Exec credential plugins: commands that a kubeconfig names, which print a token or a certificate.

https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import msgspec

from shared.model.errors import RequestError

API_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
EXEC_INFO = "KUBERNETES_EXEC_INFO"
MAX_RUN_S = 300.0
"""A plugin may ask its user to log in with a browser."""


class ExecPluginError(RequestError):
    """The plugin cannot be run, or its output is not a credential."""


class ExecCredentialStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The credential: a bearer token, a client certificate with its key, or both."""

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
    """The section `exec` of a user, as the kubeconfig has it."""

    command: str
    """A name on PATH, or a path."""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    api_version: str = API_VERSIONS[0]
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    cluster: Mapping[str, object] | None = None
    """The cluster, for plugins with `provideClusterInfo`; None: it is not provided."""

    def run(self) -> ExecCredentialStatus:
        """Run the command and return its credential. Raises ExecPluginError.

        Its standard error is shown, and it may read the terminal unless the mode is Never.
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
            raise ExecPluginError(
                f"the credential plugin {self.command} cannot be run ({error.strerror}): install "
                f"it, or correct `exec` in the kubeconfig{hint}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ExecPluginError(
                f"the credential plugin {self.command} did not end within {MAX_RUN_S:g} s"
            ) from error
        if done.returncode:
            raise ExecPluginError(
                f"the credential plugin {self.command} failed with exit code {done.returncode}: "
                "run it, or `kubectl get pods`, to see why"
            )
        return self._parse(done.stdout)

    def _parse(self, output: bytes) -> ExecCredentialStatus:
        try:
            credential = msgspec.json.decode(output, type=_ExecCredential)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ExecPluginError(
                f"the output of the credential plugin {self.command} is no ExecCredential: {error}"
            ) from error
        status = credential.status
        if credential.kind != "ExecCredential" or credential.api_version != self.api_version:
            raise ExecPluginError(
                f"the credential plugin {self.command} wrote {credential.kind or 'no kind'} of "
                f"{credential.api_version or 'no apiVersion'}, expected ExecCredential of "
                f"{self.api_version}"
            )
        if status is None or not (status.token or status.client_certificate_data):
            raise ExecPluginError(
                f"the credential plugin {self.command} returned neither a token nor a certificate"
            )
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise ExecPluginError(
                f"the credential plugin {self.command} returned only one of certificate and key"
            )
        return status


def resolve_command(command: str, folder: Path) -> str:
    """Return the command; a relative path is relative to the kubeconfig's folder."""
    if os.sep in command and not Path(command).is_absolute():
        return str(folder / command)
    return command
