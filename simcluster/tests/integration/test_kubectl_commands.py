"""The commands of a stock kubectl that people use most, one after another on one cluster."""

import json
from functools import partial
from pathlib import Path

import pytest

from simcluster.apimachinery.objects import at_path
from tests.support.kubernetes.kubectl import Kubectl, kubectl_on
from tests.support.simcluster.workloads import workload, workload_cluster
from tests.support.waiting import until

pytestmark = pytest.mark.kubectl
kubectl = kubectl_on(partial(workload_cluster, nodes=2), least_minor=31)

CREATE = """
create namespace team | namespace/team created
create deployment web --image=app:1 --replicas=2 | deployment.apps/web created
create job once --image=busybox -- true | job.batch/once created
create cronjob tick --image=busybox --schedule=@daily -- true | cronjob.batch/tick created
create job now --from=cronjob/tick | job.batch/now created
create configmap settings --from-literal=a=b | configmap/settings created
create secret generic password --from-literal=p=q | secret/password created
create serviceaccount robot | serviceaccount/robot created
create token robot --duration=1h | eyJ
create role reader --verb=get,list --resource=pods | role.rbac.authorization.k8s.io/reader created
create clusterrole keeper --verb=get --resource=nodes | clusterrole.rbac.authorization.k8s.io/keeper
create rolebinding reads --role=reader --serviceaccount=default:robot | rolebinding.rbac
create clusterrolebinding keeps --clusterrole=keeper --serviceaccount=default:robot | created
create quota amounts --hard=pods=50 -n team | resourcequota/amounts created
create pdb web --selector=app=web --min-available=1 | poddisruptionbudget.policy/web created
create priorityclass high --value=5 | priorityclass.scheduling.k8s.io/high created
create ingress front --rule=example.com/*=web:80 | ingress.networking.k8s.io/front created
run one --image=busybox --restart=Never -- sh -c echo${IFS}hello;exec${IFS}sleep${IFS}99 | pod/one
expose deployment web --port=80 | service/web exposed
"""
READ = """
wait --for=condition=Available deployment/web --timeout=60s | condition met
wait --for=condition=Ready pod/one --timeout=60s | condition met
wait --for=condition=complete job/once --timeout=60s | condition met
get pods -o wide | node-
get pods -l app=web -o name | pod/web-
get pods -o jsonpath={.items[*].metadata.name} | one
get pods -o custom-columns=POD:.metadata.name | POD
get all | deployment.apps/web
get cronjobs | @daily
get services -o wide | app=web
get deployment web -o yaml | deployment.kubernetes.io/revision: "1"
get pods -A --watch --request-timeout=3s | one
logs one | hello
exec one -- sh -c echo${IFS}$((40+2)) | 42
top pods | CPU(cores)
top nodes | node-0
events --for pod/one | Started
explain pod.spec.containers | -required-
explain deployment.spec.strategy.rollingUpdate | maxUnavailable
explain cronjob --recursive | startingDeadlineSeconds
auth can-i create pods | yes
auth can-i get pods --as=system:serviceaccount:default:robot | yes
auth can-i delete pods --as=system:serviceaccount:default:robot | no | 1
auth can-i --list --as=system:serviceaccount:default:robot | nodes
auth whoami | kubernetes-admin
api-resources | cronjobs
api-versions | metrics.k8s.io/v1beta1
version | Server Version: v1.36
cluster-info | control plane
config current-context | leasehold
get --raw /readyz | ok
describe node node-0 | Allocated resources
describe namespace team | amounts
"""
CHANGE = """
port-forward pod/one 8080:80 | Run the client in the pod (kubectl exec) | 1
autoscale deployment web --min=1 --max=3 --cpu-percent=70 | autoscaled
get horizontalpodautoscalers.v2.autoscaling web -o json | "averageUtilization": 70
get horizontalpodautoscalers.v1.autoscaling web -o json | "targetCPUUtilizationPercentage": 70
delete hpa web | deleted
label pod one tier=front | labeled
annotate deployment web kubernetes.io/change-cause=first | annotated
scale deployment web --replicas=3 | scaled
rollout status deployment web --timeout=60s | successfully rolled out
set image deployment web app=app:2 | image updated
set env deployment web A=b | env updated
set resources deployment web --limits=cpu=1 | resource requirements updated
rollout restart deployment web | restarted
rollout status deployment web --timeout=60s | successfully rolled out
rollout history deployment web | first
rollout undo deployment web --to-revision=1 | rolled back
patch deployment web -p {"spec":{"replicas":2}} | patched
patch deployment web --type=merge -p {"spec":{"paused":true}} | patched
patch deployment web --type=json -p [{"op":"remove","path":"/spec/paused"}] | patched
edit service web | service/web edited
taint node node-0 a=b:NoSchedule | tainted
taint node node-0 a- | untainted
cordon node-0 | cordoned
drain node-0 --ignore-daemonsets --force | drained
uncordon node-0 | uncordoned
delete deployment web --cascade=orphan | deployment.apps "web" deleted
get replicasets | web-
delete all --all | deleted
delete configmap,secret -l none=of-them | No resources found
delete namespace team | deleted
"""
KINDS = """
pod deployment replicaset job cronjob service configmap secret serviceaccount role rolebinding
clusterrole clusterrolebinding pdb priorityclass ingress node namespace event lease
"""


async def run_all(kubectl: Kubectl, commands: str) -> None:
    for row in commands.strip().splitlines():
        line, shown, *code = (part.strip() for part in row.split("|"))
        output = await kubectl.run(line, code=int(*code) if code else 0)
        assert shown in output, f"kubectl {line}\n{output}"


async def test_the_usual_commands_show_what_people_know(kubectl: Kubectl, tmp_path: Path) -> None:
    (tmp_path / "edit.sh").write_text('#!/bin/sh\nsed -i "s/ port: 80/ port: 81/" "$1"\n')
    (tmp_path / "edit.sh").chmod(0o755)
    await run_all(kubectl, CREATE)
    await run_all(kubectl, READ)
    (tmp_path / "file").write_text("text")
    await kubectl.run(f"cp {tmp_path}/file one:/tmp/there")
    await kubectl.run(f"cp one:/tmp/there {tmp_path}/back")
    assert (tmp_path / "back").read_text() == "text"
    line = "run typed -i --rm --quiet --image=busybox --restart=Never -- sh"
    assert "41" in await kubectl.run(line, "echo $((40+1)); exit 3\n", code=3)
    for kind in KINDS.split():
        assert "Name:" in await kubectl.run(f"describe {kind} -A"), kind
    await run_all(kubectl, CHANGE)
    assert kubectl.api.store.list("pods", "team") == []


async def test_manifests_are_applied_compared_and_checked(kubectl: Kubectl) -> None:
    manifest = json.dumps(workload("Deployment", replicas=2))
    more = json.dumps(workload("Deployment", replicas=3))
    mistyped = json.dumps(workload("Deployment", replica=2))
    wrong = json.dumps(workload("Deployment", replicas="two"))

    assert "created" in await kubectl.run("apply -f -", manifest)
    assert "unchanged" in await kubectl.run("apply -f -", manifest)
    assert "+  replicas: 3" in await kubectl.run("diff -f -", more, code=1)
    assert "configured" in await kubectl.run("apply -f -", more)
    assert "serverside-applied" in await kubectl.run("apply --server-side -f -", manifest)
    assert 'unknown field "spec.replica"' in await kubectl.run("apply -f -", mistyped, code=1)
    assert "cannot unmarshal string into field spec.replicas" in await kubectl.run(
        "replace -f -", wrong, code=1
    )
    assert "replaced" in await kubectl.run("replace -f -", manifest)
    assert "deleted" in await kubectl.run("delete -f -", manifest)


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
async def test_an_earlier_template_is_listed_and_restored(kubectl: Kubectl, kind: str) -> None:
    name = f"{kind.lower()}/web"
    await kubectl.run("apply -f -", json.dumps(workload(kind)))
    await kubectl.run(f"set image {name} main=app:2")
    await until(lambda: kubectl.run(f"rollout history {name}"), lambda text: "\n2 " in text)

    assert "rolled back" in await kubectl.run(f"rollout undo {name}")
    assert "app:1" in await kubectl.run(f"get {name} -o wide")
    revisions = await until(
        lambda: kubectl.run("get controllerrevisions"), lambda text: " 3 " in text
    )
    assert f"{kind.lower()}.apps/web" in revisions
    await kubectl.run(f"delete {name}")
    await until(lambda: not kubectl.api.store.list("controllerrevisions"))


async def test_a_cron_job_starts_jobs_on_its_schedule_and_forgets_old_ones(
    kubectl: Kubectl,
) -> None:
    store = kubectl.api.store
    await kubectl.run("create cronjob tick --image=busybox --schedule=@hourly -- true")
    refused = await kubectl.run("create cronjob bad --image=x --schedule=@often", code=1)
    assert "spec.schedule: Invalid value" in refused

    def long_ago(cron_job: dict[str, object]) -> dict[str, object]:
        return {**cron_job, "status": {"lastScheduleTime": "2026-01-01T00:00:00Z"}}

    store.patch("cronjobs", "default", "tick", long_ago, subresource="status")
    jobs = await until(lambda: store.list("jobs"))

    assert len(jobs) == 1  # the missed times count as one
    await until(lambda: at_path(store.list("cronjobs")[0], "status.lastSuccessfulTime"))
    assert "tick-" in await kubectl.run("get jobs")
    await kubectl.run("delete cronjob tick")
    await until(lambda: not store.list("jobs"))
