"""Workloads in the simulated cluster, as kubectl creates and changes them."""

import json

import pytest

from simcluster.apimachinery.objects import Json, Objects, at_path, metadata, name_of
from simcluster.controller_manager.plans import new_pod
from tests.support.kubernetes.kubectl import Kubectl, kubectl_on
from tests.support.simcluster.workloads import template, workload, workload_cluster
from tests.support.waiting import until

pytestmark = pytest.mark.kubectl
kubectl = kubectl_on(workload_cluster)


async def apply(kubectl: Kubectl, obj: Json) -> None:
    await kubectl.run("apply -f -", json.dumps(obj))


def pods(kubectl: Kubectl) -> Objects:
    return kubectl.api.store.list("pods", "default")


def running(kubectl: Kubectl) -> list[str]:
    return [name_of(pod) for pod in pods(kubectl) if at_path(pod, "status.phase") == "Running"]


class PodCounts:
    """How many pods were ready at least, and present at most, from now on."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl
        self.fewest_ready = len(running(kubectl))
        self.most_present = len(pods(kubectl))
        kubectl.api.store.listeners.append(self.observe)

    def observe(self, *_change: object) -> None:
        present = [pod for pod in pods(self.kubectl) if not metadata(pod).get("deletionTimestamp")]
        ready = [pod for pod in present if at_path(pod, "status.phase") == "Running"]
        self.fewest_ready = min(self.fewest_ready, len(ready))
        self.most_present = max(self.most_present, len(present))


async def test_a_deployment_is_rolled_out_scaled_undone_and_deleted(kubectl: Kubectl) -> None:
    await apply(kubectl, workload("Deployment", replicas=3))
    assert "successfully rolled out" in await kubectl.run("rollout status deployment/web")
    assert len(running(kubectl)) == 3
    assert {at_path(pod, "spec.nodeName") for pod in pods(kubectl)} == {
        "node-0",
        "node-1",
        "node-2",
    }

    await kubectl.run("set image deployment/web main=app:2")
    assert "successfully rolled out" in await kubectl.run("rollout status deployment/web")
    await until(lambda: len(pods(kubectl)) == 3)
    assert {pod["spec"]["containers"][0]["image"] for pod in pods(kubectl)} == {"app:2"}

    await kubectl.run("rollout undo deployment/web")
    assert "successfully rolled out" in await kubectl.run("rollout status deployment/web")
    await until(
        lambda: {pod["spec"]["containers"][0]["image"] for pod in pods(kubectl)} == {"app:1"}
    )

    await kubectl.run("scale deployment/web --replicas=5")
    await until(lambda: len(running(kubectl)) == 5)
    table = await until(
        lambda: kubectl.run("get deployments"), lambda text: "5/5" in text.splitlines()[1]
    )
    assert table.split()[:5] == ["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"]

    await kubectl.run("delete deployment web")
    await until(lambda: not pods(kubectl))
    assert kubectl.api.store.list("replicasets") == []


async def test_a_rolling_update_keeps_the_minimum_of_available_pods(kubectl: Kubectl) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    await apply(kubectl, workload("Deployment", replicas=4, strategy=strategy))
    await kubectl.run("rollout status deployment/web")
    counts = PodCounts(kubectl)
    await kubectl.run("set image deployment/web main=app:2")
    await kubectl.run("rollout status deployment/web")

    assert (counts.fewest_ready, counts.most_present) == (4, 5)


async def test_with_recreate_new_pods_start_once_all_old_ones_are_gone(kubectl: Kubectl) -> None:
    strategy = {"type": "Recreate"}
    await apply(kubectl, workload("Deployment", replicas=3, strategy=strategy))
    await kubectl.run("rollout status deployment/web")
    images = set[frozenset[str]]()

    def observe(*_change: object) -> None:
        images.add(frozenset(pod["spec"]["containers"][0]["image"] for pod in pods(kubectl)))

    kubectl.api.store.listeners.append(observe)
    await kubectl.run("set image deployment/web main=app:2")
    done = await kubectl.run("rollout status deployment/web --timeout=60s")

    assert "successfully rolled out" in done
    assert images == {frozenset(), frozenset({"app:1"}), frozenset({"app:2"})}


async def test_a_rollout_that_does_not_progress_fails_at_its_deadline(kubectl: Kubectl) -> None:
    await apply(kubectl, workload("Deployment", replicas=1, progressDeadlineSeconds=1))
    await kubectl.run("rollout status deployment/web")
    nowhere = template(nodeSelector={"disk": "ssd"})
    await apply(kubectl, workload("Deployment", replicas=1, progressDeadlineSeconds=1,
                                  template=nowhere))  # fmt: skip

    failed = await kubectl.run("rollout status deployment/web --timeout=60s", code=1)
    condition = (
        "get deployment web -o "
        """jsonpath={.status.conditions[?(@.type=="Progressing")]['status','reason','message']}"""
    )
    timed_out = await kubectl.run(condition)
    await kubectl.run("label node node-1 disk=ssd")
    await until(lambda: kubectl.run(condition), lambda text: "NewReplicaSetAvailable" in text)

    assert 'deployment "web" exceeded its progress deadline' in failed
    assert timed_out.startswith('False ProgressDeadlineExceeded ReplicaSet "web-')
    assert timed_out.endswith('" has timed out progressing.')
    assert "successfully rolled out" in await kubectl.run("rollout status deployment/web")


async def test_a_daemon_set_surges_before_it_ends_old_pods(kubectl: Kubectl) -> None:
    rolling = {"maxSurge": 1, "maxUnavailable": 0}
    surging = {"type": "RollingUpdate", "rollingUpdate": rolling}
    both = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}
    refused = json.dumps(workload("DaemonSet", updateStrategy=both))
    assert "maxSurge: Invalid value: 1: may not be set when maxUnavailable is non-zero" in (
        await kubectl.run("apply -f -", refused, code=1)
    )
    await apply(kubectl, workload("DaemonSet", updateStrategy=surging))
    await kubectl.run("rollout status daemonset/web")
    counts = PodCounts(kubectl)
    await kubectl.run("set image daemonset/web main=app:2")
    await kubectl.run("rollout status daemonset/web")
    await until(lambda: len(pods(kubectl)) == 3)

    assert {pod["spec"]["containers"][0]["image"] for pod in pods(kubectl)} == {"app:2"}
    assert (counts.fewest_ready, counts.most_present) == (3, 4)


async def test_a_deleted_pod_of_a_replica_set_is_replaced(kubectl: Kubectl) -> None:
    await apply(kubectl, workload("ReplicaSet", replicas=2))
    first = await until(lambda: running(kubectl), lambda names: len(names) == 2)

    await kubectl.run(f"delete pod {first[0]} --grace-period=0 --force")

    left = await until(
        lambda: running(kubectl), lambda names: len(names) == 2 and first[0] not in names
    )
    assert first[1] in left


async def test_dependents_stay_when_they_are_orphaned(kubectl: Kubectl) -> None:
    await apply(kubectl, workload("ReplicaSet", replicas=2))
    names = await until(lambda: running(kubectl), lambda pods: len(pods) == 2)

    await kubectl.run("delete replicaset web --cascade=orphan")

    assert running(kubectl) == names
    assert not any(metadata(pod).get("ownerReferences") for pod in pods(kubectl))


@pytest.mark.parametrize(
    ("api_version", "kind", "stays"),
    [("apps/v1", "ReplicaSet", False), ("kubeflow.org/v1", "PyTorchJob", True)],
)
async def test_an_object_whose_owner_is_gone_at_its_creation_is_deleted(
    kubectl: Kubectl, api_version: str, kind: str, stays: bool
) -> None:
    store = kubectl.api.store
    replica_set = store.create("replicasets", workload("ReplicaSet", replicas=0))
    store.delete("replicasets", "default", "web")
    late = new_pod(replica_set, kind, api_version)

    created = store.create("pods", late)

    assert store.is_gone("pods", created) is not stays


async def test_a_stateful_set_has_numbered_pods_with_claims(kubectl: Kubectl) -> None:
    kubectl.api.store.create(
        "storageclasses", {"metadata": {"name": "disks"}, "provisioner": "disks.example"}
    )
    wanted = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "disks",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    claim = {"metadata": {"name": "data"}, "spec": wanted}
    await apply(
        kubectl,
        workload("StatefulSet", replicas=3, serviceName="web", volumeClaimTemplates=[claim]),
    )
    await kubectl.run("rollout status statefulset/web")
    assert running(kubectl) == ["web-0", "web-1", "web-2"]
    claims = [name_of(claim) for claim in kubectl.api.store.list("persistentvolumeclaims")]
    assert claims == ["data-web-0", "data-web-1", "data-web-2"]

    await kubectl.run("scale statefulset/web --replicas=1")
    await until(lambda: [name_of(pod) for pod in pods(kubectl)] == ["web-0"])

    await kubectl.run("set image statefulset/web main=app:2")
    await kubectl.run("rollout status statefulset/web")
    assert pods(kubectl)[0]["spec"]["containers"][0]["image"] == "app:2"


async def test_a_daemon_set_runs_on_each_node_that_it_selects(kubectl: Kubectl) -> None:
    await kubectl.run("label node node-0 node-2 gpu=yes")
    await apply(kubectl, workload("DaemonSet", template=template(nodeSelector={"gpu": "yes"})))
    await kubectl.run("rollout status daemonset/web")
    assert {at_path(pod, "spec.nodeName") for pod in pods(kubectl)} == {"node-0", "node-2"}

    await kubectl.run("label node node-1 gpu=yes")
    await until(lambda: len(running(kubectl)) == 3)
    await kubectl.run("label node node-0 gpu-")
    await until(lambda: len(pods(kubectl)) == 2)


def job_template(**annotations: str) -> Json:
    notes = {
        f"sim.leasehold.dev/{key.replace('_', '-')}": value for key, value in annotations.items()
    }
    return template(annotations=notes, restartPolicy="Never")


async def test_a_job_completes_and_is_shown(kubectl: Kubectl) -> None:
    spec = {"completions": 4, "parallelism": 2, "template": job_template(run_for="100ms")}
    await apply(kubectl, workload("Job", **spec))

    await kubectl.run("wait --for=condition=complete job/web --timeout=30s")

    row = (await kubectl.run("get jobs")).splitlines()[1].split()
    assert row[:3] == ["web", "Complete", "4/4"]
    await kubectl.run("delete job web")
    await until(lambda: not pods(kubectl))


async def test_an_indexed_job_runs_each_index_once(kubectl: Kubectl) -> None:
    spec = {
        "completions": 3,
        "parallelism": 3,
        "completionMode": "Indexed",
        "template": job_template(run_for="100ms"),
    }
    await apply(kubectl, workload("Job", **spec))
    await kubectl.run("wait --for=condition=complete job/web --timeout=30s")

    job = kubectl.api.store.read("jobs", "default", "web")
    assert job["status"]["completedIndexes"] == "0-2"
    variables = [pod["spec"]["containers"][0]["env"] for pod in pods(kubectl)]
    assert sorted(variable[-1]["value"] for variable in variables) == ["0", "1", "2"]


async def test_a_job_fails_at_its_backoff_limit(kubectl: Kubectl) -> None:
    failing = job_template(run_for="10ms", exit_code="3")
    await apply(kubectl, workload("Job", backoffLimit=0, template=failing))

    await kubectl.run("wait --for=condition=failed job/web --timeout=30s")

    reason = await kubectl.run("get job web -o jsonpath={.status.conditions[0].reason}")
    assert reason == "BackoffLimitExceeded"


async def test_a_refused_pod_is_an_event_of_its_replica_set(kubectl: Kubectl) -> None:
    broken = workload("ReplicaSet", replicas=1)
    broken["spec"]["template"]["spec"]["priorityClassName"] = "absent"
    await apply(kubectl, broken)

    described = await until(
        lambda: kubectl.run("describe replicaset web"), lambda text: "FailedCreate" in text
    )

    assert "no PriorityClass with name absent was found" in described


async def test_an_invalid_selector_is_refused_with_its_field(kubectl: Kubectl) -> None:
    other = workload("Deployment", selector={"matchLabels": {"app": "another"}})

    shown = await kubectl.run("apply -f -", json.dumps(other), code=1)

    assert "spec.template.metadata.labels" in shown


async def test_a_pod_that_requests_a_device_waits_for_another_scheduler(kubectl: Kubectl) -> None:
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    with_device = template()
    with_device["spec"]["containers"][0]["resources"] = resources
    await apply(kubectl, workload("ReplicaSet", "gpu", replicas=1, template=with_device))
    await apply(kubectl, workload("ReplicaSet", "cpu", replicas=1))

    await until(lambda: len(running(kubectl)) == 1)
    waiting = [pod for pod in pods(kubectl) if not at_path(pod, "spec.nodeName")]
    assert [metadata(pod)["generateName"] for pod in waiting] == ["gpu-"]


async def test_a_pod_that_fits_no_node_is_explained(kubectl: Kubectl) -> None:
    nowhere = template(nodeSelector={"disk": "ssd"})
    await apply(kubectl, workload("ReplicaSet", replicas=1, template=nowhere))

    shown = await until(
        lambda: kubectl.run("get pods -o jsonpath={.items[*].status.conditions[*].message}")
    )

    assert shown.startswith("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity")
