"""What the overlays and components make of the base, by kubectl itself."""

import dataclasses
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import pytest
import yaml

from services.auth.nats_users import NatsUser
from services.auth.root_secret import complete, managed_objects
from services.auth.settings import AuthSettings
from services.node_agent.partitioner import PartitionerSettings
from services.node_agent.settings import MPS_PRIVATE, AgentSettings
from shared.dialects.dialect import Paths
from shared.runtime.variables import parse_bool
from tests.support.packaging import (
    K8S,
    OVERLAYS,
    WORKLOADS,
    Json,
    built,
    kustomize,
    kustomize_overlay,
    needs_kubectl,
    objects,
    one,
    part,
    without_hashes,
    without_kube_scheduler,
)
from tests.support.simcluster.installed import namespace_of
from tools.generate import manifests
from tools.generate.security import PARTITIONERS

COMBINED = {
    (kind, name) for kind in ("Deployment", "PodDisruptionBudget") for name in ("watcher", "placer")
}
"""What the component combined-scheduler removes: the binder's process has these services."""
FOR_PEOPLE = "operator"
"""No service waits for it: commands are executed in it."""

pytestmark = needs_kubectl


def overlay(name: str) -> list[Json]:
    return part(name)


def key(it: Json) -> tuple[str, str]:
    return it["kind"], it["metadata"]["name"]


def container(workload: Json) -> Json:
    found: Json = workload["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_builds_in_two_namespaces_with_every_object_of_the_base(name: str) -> None:
    base = built("base")
    found = overlay(name)

    known = {key(it) for it in found}
    assert {key(it) for it in base} <= known
    for workload in (o for o in found if o["kind"] in WORKLOADS):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert workload["metadata"]["namespace"] == namespace_of(workload["metadata"]["name"])


def test_with_ha_services_have_several_replicas_and_a_disruption_budget_of_one() -> None:
    found = overlay("ha")
    placer = one(found, "Deployment", "placer")
    scaler = one(found, "HorizontalPodAutoscaler", "placer")["spec"]
    replicas = {
        o["metadata"]["name"]: scaler["minReplicas"] if o is placer else o["spec"]["replicas"]
        for o in found
        if o["kind"] in {"Deployment", "StatefulSet"} and o["metadata"]["name"] != FOR_PEOPLE
    }
    budgets = {
        o["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]: o["spec"]["maxUnavailable"]
        for o in found
        if o["kind"] == "PodDisruptionBudget"
    }

    assert {name for name, count in replicas.items() if count < 2} == {"redis"}
    assert budgets == dict.fromkeys(replicas.keys() - {"redis"}, 1)
    assert "replicas" not in placer["spec"], "only the autoscaler sets their number"
    assert replicas["placer"] == 3 < scaler["maxReplicas"]
    assert scaler["metrics"][0]["resource"]["name"] == "cpu"
    assert container(placer)["resources"]["requests"]["cpu"] == "500m"


def test_with_ha_replicas_have_anti_affinity() -> None:
    for workload in overlay("ha"):
        if workload["kind"] not in {"Deployment", "StatefulSet"}:
            continue
        if workload["metadata"]["name"] == "redis":
            continue
        template = workload["spec"]["template"]
        spread = template["spec"].get("topologySpreadConstraints", ())
        affinity = template["spec"].get("affinity", {}).get("podAntiAffinity", {})
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        rules = [*spread, *(term["podAffinityTerm"] for term in terms)]
        assert "kubernetes.io/hostname" in {rule["topologyKey"] for rule in rules}
        for rule in rules:
            chosen = rule["labelSelector"]["matchLabels"]
            assert chosen.items() <= template["metadata"]["labels"].items()
            assert "app.kubernetes.io/name" in [*chosen, *rule.get("matchLabelKeys", ())]


def test_with_ha_no_preference_of_a_zone_undoes_that_of_a_node() -> None:
    """kube-scheduler ignores nodes that lack a key of any soft topology spread constraint."""
    for workload in overlay("ha"):
        if workload["kind"] in WORKLOADS:
            rules = workload["spec"]["template"]["spec"].get("topologySpreadConstraints", ())
            soft = [rule for rule in rules if rule["whenUnsatisfiable"] == "ScheduleAnyway"]
            assert len(soft) <= 1


def test_with_ha_every_nats_server_has_a_name_and_routes_to_the_others() -> None:
    found = overlay("ha")
    nats = one(found, "StatefulSet", "nats")
    service = one(found, "Service", "nats")
    flags = dict(flag.partition("=")[::2] for flag in container(nats)["args"])

    count = nats["spec"]["replicas"]
    routes = flags["--routes"].split(",")
    assert routes == [f"nats://nats-{number}.nats:6222" for number in range(count)]
    assert (flags["--name"], flags["--cluster_name"]) == ("$(POD_NAME)", "leasehold")
    assert {env["name"] for env in container(nats)["env"]} == {"GOMEMLIMIT", "POD_NAME"}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert {port["name"] for port in container(nats)["ports"]} == {"client", "cluster", "monitor"}


@pytest.mark.parametrize("name", ["keda", "combined-scheduler"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_itself_may_list_a_component_that_changes_its_deployments(
    overlay: str, name: str, tmp_path: Path
) -> None:
    for folder in (K8S, manifests.WEBHOOK):
        shutil.copytree(folder, tmp_path / folder.relative_to(K8S.parent))
    with (tmp_path / "k8s" / "overlays" / overlay / "kustomization.yaml").open("a") as file:
        file.write(f"components: [../../components/{name}]\n")

    found = {key(it) for it in objects(kustomize(tmp_path / "k8s" / "overlays" / overlay))}

    assert (("Deployment", "placer") in found) == (name == "keda")


@pytest.mark.parametrize("over", ["base", "overlays/ha"])
def test_the_combined_scheduler_has_logins_and_permissions_of_all_its_services(over: str) -> None:
    found = built(over, "combined-scheduler", "dra")
    scheduler = one(found, "Deployment", "binder")
    before = one(built(over), "Deployment", "binder")

    names = {
        it["metadata"]["name"] for it in found if it["kind"] not in {"ServiceAccount", "Secret"}
    }
    assert not names & {"watcher", "placer", "planner"}
    assert container(scheduler)["args"] == ["services.scheduler"]
    assert scheduler["spec"].get("replicas") == before["spec"].get("replicas")
    directory = Path(
        one(found, "ConfigMap", "leasehold-settings")["data"]["LEASEHOLD_REDIS_CREDENTIALS"]
    )
    mounted = {it["name"]: it["mountPath"] for it in container(scheduler)["volumeMounts"]}
    (volume,) = (it for it in scheduler["spec"]["template"]["spec"]["volumes"] if "projected" in it)
    logins = {
        Path(mounted[volume["name"]]) / item["path"]: source["secret"]["name"]
        for source in volume["projected"]["sources"]
        for item in source.get("secret", {}).get("items", ())
    }
    assert logins == {directory / name: f"redis-{name}" for name in ("binder", "placer", "planner")}
    roles: dict[str, set[str]] = {}
    for it in found:
        for subject in it.get("subjects", ()):
            roles.setdefault(subject["name"], set()).add(it["roleRef"]["name"])
    assert roles["watcher"] | roles["planner"] <= roles["binder"]
    assert "placer" not in roles
    given = {
        it["name"]: it.get("value", "") for it in container(one(found, "Deployment", "auth"))["env"]
    }
    name = next(it.name for it in dataclasses.fields(AuthSettings) if "combined" in it.name)
    assert parse_bool(given[f"LEASEHOLD_{name.upper()}"])


@pytest.mark.parametrize("over", ["base", "overlays/ha"])
@pytest.mark.parametrize("first", ["keda", "combined-scheduler"])
def test_keda_and_the_combined_scheduler_exclude_each_other(over: str, first: str) -> None:
    names = sorted(["keda", "combined-scheduler"], key=lambda name: name != first)

    with pytest.raises(subprocess.CalledProcessError) as failed:
        built(over, *names)

    assert "placer" in failed.value.stderr or "scaleTargetRef" in failed.value.stderr


def test_the_mig_component_gives_only_the_partitioner_capabilities() -> None:
    found = part("mig")
    before = {o["metadata"]["name"]: o for o in built("base") if o["kind"] in WORKLOADS}

    for workload in (o for o in found if o["kind"] in WORKLOADS):
        if workload["metadata"]["name"] != "node-agent":
            assert workload == before[workload["metadata"]["name"]]
    parts = one(found, "DaemonSet", "node-agent")["spec"]["template"]["spec"]["containers"]
    agent, partitioner = sorted(parts, key=lambda part: part["name"])
    assert agent["securityContext"] == container(before["node-agent"])["securityContext"]
    assert not any("MIG" in env["name"] for env in agent["env"])
    values = {env["name"]: env.get("value") for env in partitioner["env"]}
    assert values["NVIDIA_MIG_MONITOR_DEVICES"] == values["NVIDIA_MIG_CONFIG_DEVICES"] == "all"
    assert partitioner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert partitioner["securityContext"]["readOnlyRootFilesystem"] is True
    assert "envFrom" not in partitioner
    shared, gpus = partitioner["volumeMounts"]
    assert gpus in agent["volumeMounts"], "all GPUs, where NVIDIA's runtime ignores the variable"
    assert shared in agent["volumeMounts"]
    agent_values = {env["name"]: env.get("value") for env in agent["env"]}
    assert agent_values["LEASEHOLD_PARTITION_SOCKET"] == str(PartitionerSettings().socket)
    assert agent_values["LEASEHOLD_PARTITION_SOCKET"].startswith(shared["mountPath"])


def test_the_memory_limits_component_gives_only_the_partitioner_capabilities_and_cgroups() -> None:
    before = {o["metadata"]["name"]: o for o in built("base") if o["kind"] in WORKLOADS}
    pod = one(part("memory-limits"), "DaemonSet", "node-agent")["spec"]["template"]["spec"]
    agent, partitioner = sorted(pod["containers"], key=lambda part: part["name"])

    assert agent["securityContext"] == container(before["node-agent"])["securityContext"]
    assert partitioner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert "envFrom" not in partitioner
    paths = {it["name"]: it.get("hostPath", {}).get("path") for it in pod["volumes"]}
    mounts = {it["mountPath"]: paths[it["name"]] for it in partitioner["volumeMounts"]}
    assert mounts[str(PartitionerSettings().cgroup_root)] == "/sys/fs/cgroup"
    values = {env["name"]: env.get("value") for env in partitioner["env"]}
    assert mounts[str(Path(values["LEASEHOLD_FENCES_FILE"]).parent)] == "/run/leasehold-limits"
    assert not any(paths[it["name"]] == "/sys/fs/cgroup" for it in agent["volumeMounts"])
    agent_values = {env["name"]: env.get("value") for env in agent["env"]}
    assert agent_values["LEASEHOLD_PARTITION_SOCKET"] == str(PartitionerSettings().socket)


def test_the_mps_component_runs_daemons_in_the_directory_that_containers_mount() -> None:
    pod = one(part("mps"), "DaemonSet", "node-agent")["spec"]["template"]["spec"]
    agent, partitioner = sorted(pod["containers"], key=lambda part: part["name"])

    agent_values = {env["name"]: env.get("value") for env in agent["env"]}
    assert agent_values["LEASEHOLD_MPS"] == MPS_PRIVATE
    assert agent_values["LEASEHOLD_PARTITION_SOCKET"] == str(PartitionerSettings().socket)
    values = {env["name"]: env.get("value") for env in partitioner["env"]}
    directory = Path(values["LEASEHOLD_MPS_DIR"])
    state = PurePosixPath(agent_values["LEASEHOLD_STATE_DIR"])
    assert str(directory) == Paths.below(state, state).mps
    paths = {it["name"]: it.get("hostPath", {}).get("path") for it in pod["volumes"]}
    mounts = {it["mountPath"]: paths[it["name"]] for it in partitioner["volumeMounts"]}
    assert mounts[str(directory)] == str(directory)
    assert {"compute", "utility"} <= {*values["NVIDIA_DRIVER_CAPABILITIES"].split(",")}
    assert pod["hostPID"] is True
    assert "envFrom" not in partitioner


def test_with_every_partitioner_each_has_what_it_has_alone() -> None:
    """Of a list of capabilities, the last component's counts: the chart applies them in order."""
    together = one(built("base", *PARTITIONERS), "DaemonSet", "node-agent")
    whole = {it["name"]: it for it in together["spec"]["template"]["spec"]["containers"]}
    for name in PARTITIONERS:
        alone = one(part(name), "DaemonSet", "node-agent")["spec"]["template"]["spec"]
        for container in alone["containers"]:
            found = whole[container["name"]]
            added = {*container["securityContext"]["capabilities"]["add"]}
            assert added <= {*found["securityContext"]["capabilities"]["add"]}
            mounts = [it["mountPath"] for it in found["volumeMounts"]]
            assert {it["mountPath"] for it in container["volumeMounts"]} <= {*mounts}
            assert len({*mounts}) == len(mounts)
            values = {it["name"]: it.get("value", "") for it in found["env"]}
            for it in container["env"]:
                assert it.get("value", "") in values[it["name"]]


RIGHTS = {"ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


@pytest.mark.parametrize("names", [*((name,) for name in PARTITIONERS), PARTITIONERS], ids="+".join)
def test_what_sets_limits_gives_the_agent_itself_no_right_and_no_path(
    names: tuple[str, ...],
) -> None:
    """And without any of them nothing on a node may set limits."""
    before, after = built("base"), built("base", *names)

    assert [it for it in after if it["kind"] in RIGHTS] == [
        it for it in before if it["kind"] in RIGHTS
    ]
    assert _paths_and_rights(after) == _paths_and_rights(before)
    parts = one(before, "DaemonSet", "node-agent")["spec"]["template"]["spec"]["containers"]
    assert [it["name"] for it in parts] == ["node-agent"]
    assert not [it for it in after if it["kind"] == "Namespace"], "Pod Security is as before"


def _paths_and_rights(manifests: list[Json]) -> Json:
    """Return what the agent's container may do on its node, and what its pod shares with it."""
    pod = one(manifests, "DaemonSet", "node-agent")["spec"]["template"]["spec"]
    (agent,) = (it for it in pod["containers"] if it["name"] == "node-agent")
    paths = {it["name"]: it["hostPath"] for it in pod["volumes"] if "hostPath" in it}
    mounts = [it for it in agent["volumeMounts"] if it["name"] in paths]
    return {
        "context": agent["securityContext"],
        "mounts": [(it, paths[it["name"]]) for it in mounts],
        "pod": {name: it for name, it in pod.items() if name not in {"containers", "volumes"}},
    }


def test_mig_and_memory_limits_share_the_partitioner() -> None:
    pod = one(built("base", "mig", "memory-limits"), "DaemonSet", "node-agent")
    containers = pod["spec"]["template"]["spec"]["containers"]

    (partitioner,) = (it for it in containers if it["name"] == "partitioner")
    names = {env["name"] for env in partitioner["env"]}
    assert {"NVIDIA_MIG_CONFIG_DEVICES", "LEASEHOLD_FENCES_FILE"} <= names


def test_the_agent_can_write_cdi_specifications_and_see_the_driver() -> None:
    agent = one(built("base"), "DaemonSet", "node-agent")

    values = {env["name"]: env.get("value") for env in container(agent)["env"]}
    mounts = {it["mountPath"]: it for it in container(agent)["volumeMounts"]}
    found = agent["spec"]["template"]["spec"]["volumes"]
    volumes = {it["name"]: it.get("hostPath") for it in found}
    settings = AgentSettings(host_root=Path(values["LEASEHOLD_HOST_ROOT"]))
    assert settings.device_list_strategies == (), "the agent chooses"
    assert volumes[mounts[str(settings.cdi_directory)]["name"]]["path"] == "/var/run/cdi"
    places = settings.driver_places
    assert places is not None
    for path in ("/usr", "/dev", "/run/nvidia"):
        seen = mounts[str(places.seen(path))]
        assert (volumes[seen["name"]]["path"], seen["readOnly"]) == (path, True)
    assert seen["mountPropagation"] == "HostToContainer", "a driver that is mounted later"


def test_the_hami_core_component_copies_the_library_to_where_the_agent_looks() -> None:
    agent = one(part("hami-core"), "DaemonSet", "node-agent")
    (copying,) = agent["spec"]["template"]["spec"]["initContainers"]
    values = {env["name"]: env.get("value") for env in container(agent)["env"]}
    source = values["LEASEHOLD_LIBRARY_SOURCE"]
    mounts = {it["name"]: it for it in container(agent)["volumeMounts"]}

    (target,) = copying["volumeMounts"]
    assert copying["command"][-1].endswith(f" {target['mountPath']}/")
    assert mounts[target["name"]] == {"name": target["name"], "mountPath": source, "readOnly": True}
    assert AgentSettings(library_source=Path(source)).library_origin == Path(source)


@pytest.mark.parametrize("over", ["base", "overlays/ha"])
def test_with_keda_nothing_else_sets_the_number_of_placers(over: str) -> None:
    found = built(over, "keda")

    scaled = one(found, "ScaledObject", "placer")["spec"]
    assert scaled["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": one(found, "Deployment", "placer")["metadata"]["name"],
    }
    assert "replicas" not in one(found, "Deployment", "placer")["spec"]
    assert not [each for each in found if each["kind"] == "HorizontalPodAutoscaler"]
    [trigger] = scaled["triggers"]
    url = urlsplit(trigger["metadata"]["url"])
    service = one(found, "Service", "watcher-metrics")
    watcher = one(found, "Deployment", "watcher")
    assert url.hostname == f"watcher-metrics.{service['metadata']['namespace']}"
    assert [each["port"] for each in service["spec"]["ports"]] == [url.port]
    labels = watcher["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    ports = {each["name"] for each in container(watcher)["ports"]}
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports


def test_the_prometheus_operator_scrapes_every_component_under_the_job_names_of_the_alerts() -> (
    None
):
    found = part("prometheus-operator")
    monitor = one(found, "PodMonitor", "leasehold")["spec"]
    ports = {end["port"] for end in monitor["podMetricsEndpoints"]}

    scraped = {
        o["spec"]["template"]["metadata"]["labels"][monitor["jobLabel"]]
        for o in found
        if o["kind"] in WORKLOADS
        and monitor["selector"]["matchLabels"].items()
        <= o["spec"]["template"]["metadata"]["labels"].items()
        and ports & {port["name"] for port in container(o).get("ports", ())}
    }
    jobs = "watcher|placer|planner|binder|timekeeper|webhook|extender|node-agent"
    assert scraped >= set(jobs.split("|")) - {"extender"}, "which is a component of its own"
    assert jobs in manifests.RULES.read_text()


def test_an_external_redis_is_configured_as_documented() -> None:
    page = (K8S.parent / "docs" / "install.md").read_text()
    section = page.partition("## A Redis of your own")[2]
    patches = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])

    found = objects(without_hashes(kustomize_overlay("overlays/ha", **patches)))

    values = one(found, "ConfigMap", "leasehold-settings")["data"]
    assert values["LEASEHOLD_REDIS_URL"].startswith("rediss://redis.example.org")
    assert "LEASEHOLD_REDIS_CA_FILE" not in values
    assert container(one(found, "Deployment", "auth"))["args"][-1] == "--redis-files="
    assert one(found, "StatefulSet", "redis")["spec"]["replicas"] == 0


def test_every_awaited_key_is_created_by_the_auth_service() -> None:
    whole = complete({}, ("nats",), datetime.now(UTC), os.urandom, namespace="leasehold-system")
    user = NatsUser(name="auth", publish=(), subscribe=())
    made = {(h.kind, h.name): set(h.data) for h in managed_objects(whole, user, "/etc/nats")}
    wanted: dict[str, set[tuple[str, str]]] = {}

    for workload in (o for o in overlay("ha") if o["kind"] in WORKLOADS):
        for volume in workload["spec"]["template"]["spec"].get("volumes", ()):
            if volume["name"] != "auth":
                continue
            sources = volume.get("projected", {}).get("sources", [volume])
            for source in sources:
                secret = source.get("secret")
                shown = source.get("configMap")
                if secret:
                    name = secret.get("secretName", secret.get("name"))
                    assert {item["key"] for item in secret["items"]} <= made["secrets", name]
                    wanted.setdefault(workload["metadata"]["name"], set()).add(("secrets", name))
                if shown:
                    assert {i["key"] for i in shown["items"]} <= made["configmaps", shown["name"]]

    assert wanted == {
        "nats": {("secrets", "auth-nats")},
        "redis": {("secrets", "auth-redis")},
        **{
            name: {("secrets", f"redis-{name}")}
            for name in ("placer", "planner", "binder", "timekeeper", "api", "extender", FOR_PEOPLE)
        },
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_that_only_kube_scheduler_can_place_are_placed_unless_an_overlay_names_the_base(
    name: str, tmp_path: Path
) -> None:
    with_it = overlay(name)
    without = objects(kustomize_overlay(without_kube_scheduler(name, tmp_path)))

    def has_it(found: list[Json]) -> tuple[bool, bool, bool]:
        names = {key(it) for it in found}
        environment = container(one(found, "Deployment", "webhook")).get("env", ())
        values = {it["name"]: it.get("value") for it in environment}
        return (
            ("Deployment", "kube-scheduler") in names,
            ("Deployment", "extender") in names,
            parse_bool(values.get("LEASEHOLD_KUBE_SCHEDULER", "false")),
        )

    assert has_it(with_it) == (True, True, True)
    assert has_it(without) == (False, False, False)
    assert not any("kube-scheduler" in name for kind, name in map(key, without) if kind != "Secret")
