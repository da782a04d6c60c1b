"""`leasehold explain --request FILE`: manifests are explained without a cluster."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml

from services.cli.__main__ import main
from shared.kubernetes.manifests import pods_in
from shared.model.errors import RequestError

VGPU = """
      containers:
      - name: cuda
        image: nvidia/cuda
        resources:
          limits:
            volcano.sh/vgpu-number: 2
            volcano.sh/vgpu-memory: 3000
            volcano.sh/vgpu-cores: 50
"""
DEPLOYMENT = f"""\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web, namespace: team-a}}
spec:
  template:
    metadata: {{labels: {{app: web}}}}
    spec:
      schedulerName: volcano{VGPU}"""


def pod(limits: str, scheduler: str = "volcano") -> str:
    return f"""\
apiVersion: v1
kind: Pod
metadata: {{name: one}}
spec:
  schedulerName: {scheduler}
  containers:
  - name: cuda
    image: nvidia/cuda
    resources: {{limits: {{{limits}}}}}
"""


POD_SPEC = {"containers": [{"name": "c"}]}
TEMPLATE = {"metadata": {"annotations": {"key": "value"}}, "spec": POD_SPEC}

Explained = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Explained:
    """Return a function that explains a manifest; it returns the exit code and the output."""

    def explain(text: str, *flags: str) -> tuple[int, str, str]:
        manifest = tmp_path / "manifest.yaml"
        manifest.write_text(text)
        with pytest.raises(SystemExit) as left:
            main(["explain", "--request", str(manifest), *flags])
        output = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, output.out, output.err

    return explain


def test_a_deployments_request_binding_and_container_are_shown(explained: Explained) -> None:
    code, out, _ = explained(DEPLOYMENT, "--gpu", "T4")

    assert code == 0
    assert "Deployment web" in out
    assert "cuda: 2 GPUs, of each 3000 units of memory" in out
    assert "8 idle Tesla T4 of 15360 MiB" in out
    assert "volcano.sh/bind-phase: allocating" in out
    assert "CUDA_DEVICE_MEMORY_LIMIT_1=3000m" in out
    assert "at /etc/ld.so.preload, read-only" in out


def test_a_replica_is_shown_as_a_node_with_replicas_would_give_it(explained: Explained) -> None:
    code, out, _ = explained(pod("nvidia.com/gpu.shared: 1"), "--gpu", "T4")
    _, plain, _ = explained(pod("nvidia.com/gpu: 1"), "--gpu", "T4")

    assert code == 0
    assert "cuda: 1 replica of a node's GPUs" in out
    assert "8 idle Tesla T4 of 15360 MiB, as 4 replicas each by time-slicing" in out
    assert "3840 MiB" in out
    assert "1 GPU, whole and not shared, or a replica of each where a node offers these" in plain


def test_the_json_form_has_plain_numbers(explained: Explained) -> None:
    _, out, _ = explained(DEPLOYMENT, "--json")

    [read] = json.loads(out)["pods"]
    [container] = read["containers"]
    assert (read["system"], read["ours"], read["fault"]) == ("volcano-vgpu", True, "")
    assert [device["limit_bytes"] for device in container["devices"]] == [3000 << 20] * 2
    assert read["binding"]["volcano.sh/vgpu-ids-new"].count(",NVIDIA,3000,50:") == 2


def test_a_malformed_request_names_container_field_value_and_rule(explained: Explained) -> None:
    code, out, _ = explained(pod("volcano.sh/vgpu-number: 1, volcano.sh/vgpu-cores: 101"))

    assert code == 1
    assert "container cuda: volcano.sh/vgpu-cores must be 0 to 100, got 101" in out


@pytest.mark.parametrize(
    ("run_time", "code", "text"),
    [
        ("2h", 0, "CUDA_DEVICE_MEMORY_LIMIT_0=3000m"),
        ("2 days", 1, "annotation leasehold.dev/max-run-time: '2 days' is not a"),
    ],
)
def test_a_maximum_run_time_is_read_before_admission_enforces_it(
    explained: Explained, run_time: str, code: int, text: str
) -> None:
    written = pod("volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000").replace(
        "name: one", f"name: one, annotations: {{leasehold.dev/max-run-time: {run_time}}}"
    )

    explained_code, out, _ = explained(written)

    assert explained_code == code
    assert text in out


def test_a_request_that_no_such_device_fits_is_refused_with_the_numbers(
    explained: Explained,
) -> None:
    limits = "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 20000"
    code, out, _ = explained(pod(limits), "--gpu", "T4")

    assert code == 1
    assert "Insufficient GPU memory" in out
    assert "set volcano.sh/vgpu-memory: 15360," in out


@pytest.mark.parametrize(
    ("scheduler", "text"),
    [
        ("default-scheduler", "  scheduler   leasehold: the webhook sets it\n"),
        ("yunikorn", "schedulerName is 'yunikorn': remove it for Leasehold to schedule the pod"),
    ],
)
def test_a_pod_of_another_scheduler_is_read_and_reported_as_such(
    explained: Explained, scheduler: str, text: str
) -> None:
    code, out, _ = explained(pod("volcano.sh/vgpu-number: 1", scheduler=scheduler))

    assert code == 0
    assert text in out


def test_a_misspelt_resource_is_reported_with_the_one_that_was_meant(explained: Explained) -> None:
    code, out, _ = explained(pod("nvidia.com/gpu-mem: 1"))

    assert code == 1
    assert "requests nvidia.com/gpu-mem: did you mean nvidia.com/gpumem?" in out


@pytest.mark.parametrize(
    ("limit", "limits"),
    [
        ("nvidia.com/gpu-memory: 3000", {"nvidia.com/gpumem": "3000"}),
        ("nvidia.com/gpu: 0.5", {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}),
    ],
)
def test_the_change_that_is_advised_is_there_as_a_patch(
    explained: Explained, limit: str, limits: dict[str, str]
) -> None:
    manifest = pod(limit)
    _, out, _ = explained(manifest, "-o", "json")

    [report] = json.loads(out)["pods"]
    mended = jsonpatch.apply_patch(yaml.safe_load(manifest), report["patch"])
    assert mended["spec"]["containers"][0]["resources"]["limits"] == limits


def test_annotations_that_are_not_read_have_the_limits_they_stand_for_as_a_patch(
    explained: Explained,
) -> None:
    manifest = KAI.replace("SCHEDULER", "leasehold").replace(
        "gpu-fraction:", "run.ai/gpu-fraction:"
    )
    _, out, _ = explained(manifest, "-o", "json")

    [report] = json.loads(out)["pods"]
    mended = jsonpatch.apply_patch(yaml.safe_load(manifest), report["patch"])
    assert mended["metadata"]["annotations"] == {}
    assert mended["spec"]["containers"][1]["resources"]["limits"] == {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem-percentage": "50",
    }


def test_another_accelerator_beside_a_gpu_is_warned_of(explained: Explained) -> None:
    code, out, _ = explained(pod("nvidia.com/gpu: 1, habana.ai/gaudi: 1"), "--gpu", "T4")

    assert code == 0
    assert (
        "only a node that has habana.ai/gaudi beside its GPUs fits: remove it, as the pod requests "
        "nvidia.com/gpu, too"
    ) in " ".join(out.split())


def test_a_pod_without_a_gpu_is_reported_as_such(explained: Explained) -> None:
    code, out, _ = explained(pod("cpu: 1"))

    assert code == 0
    assert "requests no GPU by a resource name that Leasehold knows" in out


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "has no pod in it"),
        ("{", "is not YAML"),
        ("- a", "is not a Kubernetes object"),
        ("kind: Service\nmetadata: {name: s}", "has no pod in it"),
        ("kind: Deployment\nspec: {}", "has no pod spec"),
        ("kind: Pod\nmetadata: {name: p}\nspec: {containers: 1}", "Pod p is not a pod"),
        ("kind: Pod\nmetadata: {name: p}\nspec: {schedulerName: .nan}", "Pod p is not a pod"),
        ("kind: Pod\nmetadata: {name: p}\nspec: {? [a] : b}", "is not YAML"),
        ("kind: Pod\nmetadata: p\nspec: {containers: []}", "metadata must be a mapping"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_reason(
    explained: Explained, text: str, rule: str
) -> None:
    code, _, err = explained(text)

    assert code == 2
    assert rule in err
    assert "Traceback" not in err


def test_pods_are_found_in_every_kind_that_creates_them() -> None:
    template = {"spec": {"containers": [{"name": "c"}]}}
    made = [
        ("CronJob", "cron", {"jobTemplate": {"spec": {"template": template}}}),
        ("Job", "plain", {"template": template}),
        ("Job", "ring", {"tasks": [{"name": n, "template": template} for n in ("m", "w")]}),
    ]
    items = [{"kind": k, "metadata": {"name": n}, "spec": spec} for k, n, spec in made]
    bare = {"kind": "Pod", "metadata": {"generateName": "try-"}, **template}
    manifest = yaml.safe_dump_all([{"kind": "List", "items": items}, bare])

    assert [written.origin for written in pods_in(manifest, "f")] == [
        "CronJob cron",
        "Job plain",
        "Job ring, task m",
        "Job ring, task w",
        "Pod try-…",
    ]


@pytest.mark.parametrize(
    ("spec", "pods"),
    [
        ({"predictor": POD_SPEC}, [("predictor", 1)]),
        ({"groups": [{"replicas": 2, "template": TEMPLATE}]}, [("groups[0].template", 2)]),
        (
            {"replicas": 2, "job": {"spec": {"parallelism": 3, "template": TEMPLATE}}},
            [("job.spec.template", 6)],
        ),
        (
            {"Master": {"template": TEMPLATE}, "Worker": {"replicas": 4, "template": TEMPLATE}},
            [("Master.template", 1), ("Worker.template", 4)],
        ),
    ],
)
def test_pods_are_found_in_kinds_of_other_projects(
    spec: dict[str, Any], pods: list[tuple[str, int]]
) -> None:
    manifest = yaml.safe_dump({"kind": "Other", "metadata": {"name": "a"}, "spec": spec})

    written = pods_in(manifest, "f")

    assert [(pod.origin, pod.replicas) for pod in written] == [
        (f"Other a, spec.{path}", count) for path, count in pods
    ]
    assert {pod.pod.spec.containers[0].name for pod in written} == {"c"}
    notes = [pod.pod.metadata.annotations for pod in written if "template" in pod.origin]
    assert notes == [{"key": "value"}] * len(notes)


def test_a_manifest_and_a_pod_exclude_each_other(explained: Explained) -> None:
    code, _, err = explained(DEPLOYMENT, "my-pod")

    assert code == 2
    assert "either a POD or, with --request, a manifest" in err


DOUBLED = "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    "text", [f"b0: &b0 [x]\n{DOUBLED}", "kind: Pod\nspec: &a {containers: [*a]}"]
)
def test_aliases_that_would_fill_the_memory_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="too large once its aliases are filled in"):
        pods_in(text, "f")


def test_a_pod_that_requires_mig_is_placed_on_instances(explained: Explained) -> None:
    limits = "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000"
    notes = 'annotations: {volcano.sh/vgpu-mode: "mig"}'
    text = pod(limits).replace("{name: one}", f"{{name: one, {notes}}}")

    code, out, _ = explained(text, "--gpu", "A100-40GB")

    assert code == 0
    assert "8 idle NVIDIA A100-SXM4-40GB of 40960 MiB, in MIG mode" in out
    assert "[group1-0],NVIDIA,3000,0:" in out
    assert "NVIDIA_VISIBLE_DEVICES=MIG-(the UUID of this 1g.5gb)" in out


def test_a_model_without_mig_is_refused_with_those_that_have_it(explained: Explained) -> None:
    code, _, err = explained(DEPLOYMENT, "--gpu", "T4:mig")

    assert code == 2
    assert "T4 has no mode 'mig'; there are A30:mig" in err


STRICT = "metadata: {name: one, annotations: {leasehold.dev/isolation: strict}}"


@pytest.mark.parametrize(
    ("limits", "output"),
    [
        ("volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000", "as a MIG instance"),
        ("volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000", "(the UUID of this 1g."),
        ("volcano.sh/vgpu-number: 1", "exclusively"),
        ("volcano.sh/gpu-memory: 1024", "isolation is strict: request whole GPUs"),
    ],
)
def test_strict_isolation_is_explained(explained: Explained, limits: str, output: str) -> None:
    manifest = pod(limits).replace("metadata: {name: one}", STRICT)

    _, out, err = explained(manifest)

    assert output in out + err


KAI = """\
apiVersion: v1
kind: Pod
metadata:
  name: half
  annotations: {gpu-fraction: "0.5", gpu-fraction-container-name: cuda}
spec:
  schedulerName: SCHEDULER
  containers:
  - {name: side, image: app}
  - {name: cuda, image: nvidia/cuda}
"""


def test_a_pod_in_kais_words_shows_its_container_and_its_part_of_the_gpu(
    explained: Explained,
) -> None:
    served = ("--schedulers", "leasehold,kai-scheduler")
    code, out, _ = explained(KAI.replace("SCHEDULER", "kai-scheduler"), "--gpu", "T4", *served)

    assert code == 0
    assert "container   cuda: 1 GPU, of it 50 % of the memory" in out
    assert "container cuda gets\n    7680 MiB of GPU 0\n" in out
    assert "GPU_PORTION=0.50" in out
    assert "schedulerName" not in out


@pytest.mark.parametrize(
    ("scheduler", "text"),
    [
        ("kai-scheduler", "where an administrator adds this name to --schedulers"),
        ("leasehold", "have no effect: they are read in pods with schedulerName kai-scheduler"),
    ],
)
def test_a_pod_in_kais_words_that_is_not_served_shows_why(
    explained: Explained, scheduler: str, text: str
) -> None:
    _, out, _ = explained(KAI.replace("SCHEDULER", scheduler))

    assert text in out


CLAIMS = """apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: slices}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {deviceClassName: CLASS, capacity: {requests: {memory: 8Gi, cores: "50"}}}
      - {name: whole, exactly: {deviceClassName: CLASS}}
      - {name: nic, exactly: {deviceClassName: nic.example.com}}
      config:
      - requests: [whole]
        opaque:
          driver: DRIVER
          parameters:
            apiVersion: resource.nvidia.com/v1beta1
            kind: GpuConfig
            sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Short}}
---
apiVersion: v1
kind: Pod
metadata: {name: one}
spec:
  containers: [{name: main, image: cuda, resources: {claims: [{name: gpu}]}}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: slices}]
"""
OURS = CLAIMS.replace("CLASS", "gpu.leasehold.dev").replace("DRIVER", "gpu.leasehold.dev")


def test_a_claim_shows_its_shares_and_what_its_parameters_ask_for(explained: Explained) -> None:
    code, out, _ = explained(OURS)

    assert code == 0
    assert "request     gpu: 8192 MiB of a GPU, 50 % of the cores (gpu.leasehold.dev)" in out
    assert "request     whole: a whole GPU; the GPU's time slices have the length Short" in out
    assert "nic" not in out
    assert "claim       gpu: kube-scheduler allocates it, see docs/claims.md" in out


def test_a_claim_for_nvidias_driver_shows_what_to_write_and_what_it_gets_then(
    explained: Explained,
) -> None:
    text = CLAIMS.replace("CLASS", "gpu.nvidia.com").replace("DRIVER", "gpu.nvidia.com")

    code, out, _ = explained(text.partition("---")[0])

    assert code == 1
    for change in (
        "deviceClassName gpu.nvidia.com of request whole is of NVIDIA's driver: write "
        "gpu.leasehold.dev",
        "parameters for driver gpu.nvidia.com are NVIDIA's: write driver: gpu.leasehold.dev",
        "time slices have the length Short",
    ):
        assert change in " ".join(out.split())


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Short", "Shorter", "refused     parameters of the claim are invalid: Invalid enum value"),
        ("TimeSlicing,", "MPS,", "refused     sharing.timeSlicingConfig is set, and"),
        ("8Gi", "eight", "refused     "),
        ("[whole]", "[gpu]", "request gpu is for a part of a GPU, whose other users would have"),
    ],
)
def test_parameters_that_would_refuse_a_claim_are_shown(
    explained: Explained, old: str, new: str, fault: str
) -> None:
    code, out, _ = explained(OURS.replace(old, new))

    assert code == 1
    assert fault in " ".join(out.split("\n"))


def test_time_slices_of_an_instance_are_said_to_have_no_effect(explained: Explained) -> None:
    text = OURS.replace("kind: GpuConfig", "kind: MigDeviceConfig")

    code, out, _ = explained(text)

    assert code == 0
    assert "warning     sharing.strategy TimeSlicing of a MigDeviceConfig has no effect" in out


@pytest.mark.parametrize("spec", ["[]", "{devices: {requests: 1}}", "{devices: {config: [x]}}"])
def test_a_malformed_claim_is_an_error_in_one_line(explained: Explained, spec: str) -> None:
    code, _, err = explained(f"{{kind: ResourceClaim, metadata: {{name: a}}, spec: {spec}}}")

    assert code != 0
    assert "ResourceClaim a is malformed" in err
    assert len(err.strip().splitlines()) == 1


AMOUNTS = "resources: {limits: {cpu: 1}}"
OF_POD = "resources: {limits: {nvidia.com/gpu: 1}}"


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        (AMOUNTS, "resources: {nvidia.com/gpu: 1}", "spec.containers[cuda].resources"),
        (AMOUNTS, "limits: {nvidia.com/gpu: 1}", "spec.containers[cuda].limits"),
        (
            AMOUNTS,
            "resources: {limit: {nvidia.com/gpu: 1}}",
            "spec.containers[cuda].resources.limit",
        ),
        ("  containers:", f"  {OF_POD}\n  containers:", "spec.resources.limits"),
    ],
)
def test_an_amount_in_another_place_has_its_place_as_a_patch(
    explained: Explained, before: str, after: str, place: str
) -> None:
    text = pod("cpu: 1", "leasehold").replace(before, after)

    code, out, _ = explained(text, "--json")

    [read] = json.loads(out)["pods"]
    assert code == 1
    assert (
        f"nvidia.com/gpu has no effect in {place}: write it into resources.limits" in read["fault"]
    )
    mended = jsonpatch.apply_patch(yaml.safe_load(text), read["patch"])
    limits = mended["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    assert not mended["spec"].get("resources", {}).get("limits")


@pytest.mark.parametrize("place", ["annotations", "labels"])
def test_what_a_controller_does_not_give_its_pods_is_warned_of(
    explained: Explained, place: str
) -> None:
    name = {"annotations": "leasehold.dev/max-run-time", "labels": "leasehold.dev/preemptible"}
    own = f"name: web, {place}: {{{name[place]}: '1h'}}"

    _, out, _ = explained(DEPLOYMENT.replace("name: web", own))

    assert (
        f"{name[place]} of the Deployment web has no effect on its pods: write it into "
        f"spec.template.metadata.{place}"
    ) in " ".join(out.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            pod("nvidia.com/gpu: 1").replace("name: one", "name: one, annotations: {a: true}"),
            'annotation a must be text, and YAML reads true as a boolean: write "true"',
        ),
        (
            pod("nvidia.com/gpu: 1").replace("image: nvidia/cuda", "env: [{name: A, value: 1}]"),
            'variable A must be text, and YAML reads 1 as a number: write "1"',
        ),
        (
            pod("nvidia.com/gpu: true"),
            "each value of spec.containers[0].resources.limits must be an amount, and is true",
        ),
        (
            pod("cpu: 1").replace("limits: {cpu: 1}", "limits: [cpu]"),
            "limits must be a mapping (`key: value`), and is a list (`- item`)",
        ),
        (
            pod("cpu: 1").replace("kind: Pod", "kind: pod"),
            "Kubernetes knows no kind pod: write Pod",
        ),
        ("kind: Pod\nspec: {{ .Values.x }}", "a template of Helm, so fill it in first"),
        (
            "kind: Deployment\nmetadata: {name: a}\nspec: {containers: []}",
            "its containers belong into spec.template.spec.containers",
        ),
    ],
)
def test_a_manifest_that_kubernetes_refuses_is_refused_in_words_of_yaml(
    text: str, message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        pods_in(text, "f")

    assert message in str(refused.value)


@pytest.mark.parametrize("limits", ["nvidia.com/gpumem: 3000", "koordinator.sh/gpu: 50"])
def test_amounts_that_admission_adds_are_there_for_the_explanation(
    explained: Explained, limits: str
) -> None:
    code, out, _ = explained(pod(limits, "leasehold"))

    assert code == 0
    assert "cuda: 1 GPU" in out


def test_a_resource_of_no_system_has_the_one_that_was_meant_as_a_patch(
    explained: Explained,
) -> None:
    _, out, _ = explained(pod("nvdia.com/gpu: 1"), "--json")

    [read] = json.loads(out)["pods"]
    assert {operation["path"] for operation in read["patch"]} == {
        "/spec/containers/0/resources/limits/nvidia.com~1gpu",
        "/spec/containers/0/resources/limits/nvdia.com~1gpu",
    }
