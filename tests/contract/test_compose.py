"""The compose file starts what exists, with flags that exist, and holds no secret."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from services.cli.doctor.cluster_checks import BY_IMAGE
from simcluster.apiserver.admission.service_address import endpoint_of_port
from simcluster.apiserver.registry import open_store
from simcluster.installation import Installation
from tests.contract.test_pods_start import fault_of

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
OURS = {
    name: service
    for name, service in COMPOSE["services"].items()
    if str(service.get("command", [""])[0]).partition(".")[0] in {"services", "simcluster"}
}
COMMANDS = COMPOSE["services"]["operator"]
ONCE = ("credentials", "installation")
PINNED = re.compile(r"^\$\{REGISTRY:-\}[\w./-]+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}$")


@pytest.mark.parametrize("name", OURS)
def test_every_service_of_ours_accepts_its_flags_and_has_no_capabilities(name: str) -> None:
    service = OURS[name]

    assert fault_of(tuple(service["command"])) == ""
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert name in ONCE or service["healthcheck"]["test"][0] == "CMD"


def test_prometheus_scrapes_every_leasehold_service_at_its_port() -> None:
    scraped = yaml.safe_load((ROOT / "k8s/monitoring/prometheus.yaml").read_text())
    targets: set[str] = set()
    for job in scraped["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            targets |= {f"{name}:{found['port']}" for name in found["names"]}
        for given in job.get("static_configs", []):
            targets |= set(given["targets"])
    flags = {name: dict(re.findall(r"--([\w-]+)=(\S+)", _text(name))) for name in OURS}
    agents = [one for one in OURS if one.startswith("agent-")]
    inside = {f"simcluster:{flags[one][flag].rpartition(':')[2]}"
              for one in agents for flag in ("http", "monitor-http")}  # fmt: skip
    old = f"api:{flags['api']['scheduler-metrics'].rpartition(':')[2]}"
    unscraped = {"simcluster", *agents, *ONCE}
    others = {f"{name}:9100" for name in OURS if name not in unscraped}

    assert targets == {*inside, *others, old}


def _text(name: str) -> str:
    return " ".join(OURS[name]["command"])


def test_agents_in_one_network_have_distinct_ports_and_names() -> None:
    for flag in ("http", "monitor-http", "instance", "node", "state-dir"):
        given = [re.findall(rf"--{flag}=(\S+)", _text(name)) for name in OURS if "agent" in name]

        assert len({one for (one,) in given}) == len(given) == 2


def test_other_images_are_pinned_and_their_registry_is_a_setting() -> None:
    others = [s["image"] for s in COMPOSE["services"].values() if s["image"] != COMMANDS["image"]]

    assert [image for image in others if not PINNED.match(image)] == []
    assert "latest" not in str(others)


def test_every_dependency_and_every_mounted_file_exists() -> None:
    services = COMPOSE["services"]
    volumes = COMPOSE["volumes"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in volumes


def test_every_secret_and_certificate_is_created_before_its_service_starts(
    tmp_path: Path,
) -> None:
    command = [word.replace("/var/lib", str(tmp_path)) for word in OURS["credentials"]["command"]]

    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)

    for name, service in COMPOSE["services"].items():
        named = re.findall(r"/var/lib(/credentials/[\w./-]+)", str(service))
        assert [path for path in named if not (tmp_path / path[1:]).is_file()] == []
        if named and service is not COMMANDS and name not in ONCE:
            assert (
                service["depends_on"]["credentials"]["condition"]
                == "service_completed_successfully"
            )
            assert "credentials:/var/lib/credentials:ro" in service["volumes"]


def test_every_service_has_its_own_user_at_nats_and_redis() -> None:
    for server in ("NATS", "REDIS"):
        variable = f"LEASEHOLD_{server}_CREDENTIALS"
        shown = {
            name: service["environment"][variable]
            for name, service in OURS.items()
            if variable in service.get("environment", {})
        }
        assert len(set(shown.values())) == len(shown) >= 4
        for name, path in shown.items():
            assert Path(path).name.replace("node-agent.node", "agent") == name


def test_operator_commands_run_in_a_container_that_up_does_not_start() -> None:
    runs = [sys.executable, *COMMANDS["entrypoint"][1:], "audit", "--help"]
    shown = subprocess.run(runs, capture_output=True, text=True, check=True).stdout
    environment = COMMANDS["environment"]

    assert COMMANDS["profiles"] == ["commands"]
    assert environment["LEASEHOLD_DOCTOR_ONLY"] == "cluster", "it has no kubelet and no device"
    assert "depends_on" not in COMMANDS, "a command is no reason to make others anew"
    assert {
        Path(environment[f"LEASEHOLD_{server}_CREDENTIALS"]).name for server in ("NATS", "REDIS")
    } == {"operator"}
    assert "LEASEHOLD_AGENTS" in shown
    for agent in (one for one in OURS if one.startswith("agent-")):
        (state,) = re.findall(r"--state-dir=(\S+)", _text(agent))
        assert str(Path(state).parent) == environment["LEASEHOLD_AGENTS"]


def test_the_simulated_cluster_installs_an_account_for_each_service_that_uses_it(
    tmp_path: Path,
) -> None:
    command = [word.replace("/var/lib", str(tmp_path)) for word in OURS["installation"]["command"]]
    (tmp_path / "accounts").mkdir()
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    (file,) = re.findall(r"--install=/var/lib/(\S+)", _text("simcluster"))
    described = msgspec.json.decode((tmp_path / file).read_bytes(), type=Installation)
    store = open_store()
    store.create("namespaces", {"metadata": {"name": "kube-system"}})

    described.create_objects(store)

    used = {
        service["environment"]["LEASEHOLD_KUBECONFIG"].replace("/var/lib", str(tmp_path))
        for service in COMPOSE["services"].values()
        if "LEASEHOLD_KUBECONFIG" in service.get("environment", {})
    }
    assert used == {account.kubeconfig for account in described.accounts}
    (authority,) = re.findall(r"--client-ca-file=/var/lib/(\S+)", _text("webhook"))
    assert described.webhook_client_ca == str(tmp_path / authority)
    assert store.list("validatingadmissionpolicies")
    (group,) = store.list("apiservices")
    service = group["spec"]["service"]
    found = store.read("services", service["namespace"], service["name"])
    address = endpoint_of_port(store, found, str(service["port"]))
    host, _, port = address.partition(":")
    assert f"--aggregated=0.0.0.0:{port}" in COMPOSE["services"][host]["command"]


def test_the_file_holds_no_secret() -> None:
    text = (ROOT / "compose.yaml").read_text().lower()

    assert not re.search(r"(password|secret|token|private)(?!_file)\w*\s*[:=]", text)


def test_every_stage_of_the_image_comes_from_the_base_that_the_user_gives() -> None:
    stages = re.findall(
        r"^FROM (\S+)(?: AS (\S+))?$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    names = {name for _, name in stages}

    assert {base for base, _ in stages if base not in names} == {"${REGISTRY}${BASE}"}


def test_doctor_knows_the_settings_that_the_image_has() -> None:
    assert set(re.findall(r"LEASEHOLD_\w+(?==)", (ROOT / "Dockerfile").read_text())) == BY_IMAGE


def test_the_image_copies_existing_files_and_runs_as_nobody() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if re.match(r"COPY (?!--from)", line)]

    assert [path for paths in copied for path in paths if not (ROOT / path).exists()] == []
    assert "USER 65532:65532" in lines
    stages = "\n".join(lines).split("\nFROM ")[1:]
    assert [stage for stage in stages if "COPY simcluster" in stage] == [
        stage for stage in stages if stage.startswith("source AS wheel-simulated\n")
    ]
    assert stages[-1] == "runtime\nCOPY --from=build /opt/leasehold /opt/leasehold"
