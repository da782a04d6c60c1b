"""The agent as a unit of its node: its unit files, beside the DaemonSet that they stand for."""

import configparser
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.admin.node_keys import API_TOKEN, KUBECONFIG, NATS_AUTHORITY, NATS_TOKEN
from services.node_agent.settings import AgentSettings
from shared.runtime.variables import PREFIX

K8S = Path(__file__).parents[2] / "k8s"
NODE = K8S / "node"
Json = dict[str, Any]


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(NODE / name)
    return parser


def objects(path: Path) -> dict[tuple[str, str], Json]:
    found = (each for each in yaml.safe_load_all(path.read_text()) if each)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod_spec() -> Json:
    daemon_set = objects(K8S / "base" / "node-agent.yaml")["DaemonSet", "node-agent"]
    spec: Json = daemon_set["spec"]["template"]["spec"]
    return spec


def environment() -> dict[str, str]:
    lines = (NODE / "agent.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_daemon_set_skips_nodes_of_the_unit_after_which_the_kubelet_starts() -> None:
    found = unit("leasehold-agent.service")
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = pod_spec()["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]

    skipped = {"key": "leasehold.dev/agent", "operator": "NotIn", "values": ["unit"]}
    assert all(skipped in term["matchExpressions"] for term in terms)

    assert found["Unit"]["Before"] == "kubelet.service"
    assert "network" not in found["Unit"]["After"]
    assert found["Service"]["Type"] == "notify"
    assert int(found["Service"]["TimeoutStartSec"]) <= 20
    assert (found["Service"]["Restart"], found["Unit"]["StartLimitIntervalSec"]) == ("always", "0")


def test_the_unit_has_the_capabilities_and_writable_paths_of_the_pod() -> None:
    service = unit("leasehold-agent.service")["Service"]
    (container,) = pod_spec()["containers"]
    context = container["securityContext"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod_spec()["volumes"]
             if "hostPath" in volume}  # fmt: skip
    written = {
        paths[mount["name"]]
        for mount in container["volumeMounts"]
        if mount["name"] in paths and not mount.get("readOnly")
    }

    assert service["CapabilityBoundingSet"] == "CAP_" + " CAP_".join(context["capabilities"]["add"])
    assert (service["NoNewPrivileges"], context["allowPrivilegeEscalation"]) == ("yes", False)
    assert (service["ProtectSystem"], context["readOnlyRootFilesystem"]) == ("strict", True)
    writable = {f"/var/lib/{name}" for name in service["StateDirectory"].split()}
    assert written == writable | {f"/var/run/{service['RuntimeDirectory']}"}
    assert "ReadWritePaths" not in service  # which would have to be there before the unit starts
    assert int(service["TimeoutStopSec"]) == pod_spec()["terminationGracePeriodSeconds"]


def test_the_environment_names_settings_of_the_agent_and_the_files_that_node_keys_writes() -> None:
    variables = environment()
    known = {PREFIX + each.name.upper() for each in fields(AgentSettings)}
    keys = {
        Path(text).name for text in variables.values() if text.startswith("/etc/leasehold/keys/")
    }
    renewal = unit("leasehold-node-keys.service")["Service"]

    assert set(variables) <= known
    assert keys == {API_TOKEN, KUBECONFIG, NATS_AUTHORITY, NATS_TOKEN}
    assert renewal["ExecStart"].endswith("leasehold node-keys --out /etc/leasehold/keys")
    assert renewal["ReadWritePaths"] == "/etc/leasehold/keys"
    assert renewal["CapabilityBoundingSet"] == ""


def test_the_nats_address_is_a_name_in_its_certificate() -> None:
    name = environment()["LEASEHOLD_NATS_URL"].removeprefix("nats://").partition(":")[0]
    auth = objects(K8S / "base" / "auth.yaml")["Deployment", "auth"]
    (container,) = auth["spec"]["template"]["spec"]["containers"]
    (names,) = [arg for arg in container["args"] if arg.startswith("--names=")]
    component = objects(K8S / "components" / "node-unit" / "node-unit.yaml")
    service = component["Service", "nats-for-nodes"]["spec"]

    assert name in names.removeprefix("--names=").split(",")
    assert service["selector"] == {"app.kubernetes.io/name": "nats"}
    assert service["ports"] == [{"name": "client", "port": 4222}]


def test_an_agent_may_request_tokens_only_under_a_policy() -> None:
    component = objects(K8S / "components" / "node-unit" / "node-unit.yaml")
    (rule, _) = component["Role", "node-agent-keys"]["rules"]
    policy = component["ValidatingAdmissionPolicy", "leasehold-node-keys"]["spec"]

    assert (rule["resources"], rule["resourceNames"]) == (["serviceaccounts/token"], ["node-agent"])
    assert policy["matchConstraints"]["resourceRules"][0]["resources"] == rule["resources"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_every_line(tmp_path: Path) -> None:
    for path in NODE.iterdir():
        text = path.read_text().replace("/opt/leasehold/bin/", "/usr/bin/env ")
        (tmp_path / path.name).write_text(text)
    units = sorted(path for path in tmp_path.iterdir() if path.suffix in {".service", ".timer"})

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units)],
        capture_output=True,
        text=True,
        check=False,
    )

    complaints = [line for line in done.stderr.splitlines() if "leasehold" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr
