"""What a pod of the manifests finds when it starts: flags that its program reads, places to write.

Seen on a real kubelet first, where pods with a flag that no program reads, or without a place for
temporary files, never became ready.
"""

import contextlib
import io
import os
import runpy
import sys
import warnings
from functools import cache
from unittest import mock

import pytest

from tests.support.packaging import (
    COMPONENTS,
    OVERLAYS,
    Json,
    built,
    needs_kubectl,
    one,
    part,
)

pytestmark = needs_kubectl


def ours(found: list[Json]) -> list[tuple[Json, Json]]:
    """Every container of our image, with its pod."""
    pods = [o["spec"]["template"]["spec"] for o in found if "template" in o.get("spec", {})]
    return [
        (pod, container)
        for pod in pods
        for container in pod["containers"]
        if container["image"].startswith("leasehold")
    ]


def variables(found: list[Json], container: Json) -> dict[str, str]:
    """Return the container's environment; values that only the kubelet knows are `known-there`."""
    given: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        given |= one(found, "ConfigMap", source["configMapRef"]["name"])["data"]
    return given | {item["name"]: item.get("value", "known-there") for item in container["env"]}


def refused(found: list[Json]) -> list[str]:
    """Have every container of ours read what it is given; return what is not understood."""
    commands = [
        (tuple(container["args"]), tuple(sorted(variables(found, container).items())))
        for _, container in ours(found)
        if "command" not in container
    ]
    return [fault for args, given in commands if (fault := fault_of(args, given))]


@cache
def fault_of(args: tuple[str, ...], given: tuple[tuple[str, str], ...] = ()) -> str:
    """Run a module with these words; `--help` comes last and ends it when the others are read."""
    shown = io.StringIO()
    errors = io.StringIO()
    outside = {name: text for name, text in os.environ.items() if not name.startswith("LEASEHOLD")}
    with (
        mock.patch.dict(os.environ, outside | dict(given), clear=True),
        mock.patch.object(sys, "argv", [*args, "--help"]),
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),  # imported already
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_module(args[0], run_name="__main__")
    words = [word.partition("=")[0] for word in args if word.startswith("--")]
    unknown = [word for word in words if f"{word} " not in shown.getvalue()]
    return f"{args[0]}: {unknown} {errors.getvalue()[-200:]}" if ended.value.code or unknown else ""


@pytest.mark.parametrize("name", [*OVERLAYS, *COMPONENTS])
def test_every_service_accepts_its_flags_and_variables(name: str) -> None:
    assert len(ours(part(name))) >= 6
    assert refused(part(name)) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_containers_have_a_tmp_in_memory_and_probes(name: str) -> None:
    for pod, container in ours(part(name)):
        at = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volume = {each["name"]: each for each in pod["volumes"]}[at["/tmp"]]

        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert volume["emptyDir"]["medium"] == "Memory"
        if container["name"] != "operator":
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
            assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_nats_clients_use_a_service_with_a_cluster_ip() -> None:
    found = built("base")
    url = one(found, "ConfigMap", "leasehold-settings")["data"]["LEASEHOLD_NATS_URL"]
    name = url.removeprefix("nats://").partition(":")[0]
    args = one(found, "Deployment", "auth")["spec"]["template"]["spec"]["containers"][0]["args"]
    (names,) = [arg.removeprefix("--names=") for arg in args if arg.startswith("--names=")]

    assert one(found, "Service", name)["spec"].get("clusterIP") != "None"
    assert name in names.split(",")
