"""Settings of a node's container runtime by which pods get GPUs that they name."""

import logging
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.node_agent.container_runtime.runtime_settings import (
    SWITCH,
    judge_open_settings,
    open_settings,
)
from services.node_agent.container_runtime.runtime_watch import RuntimeWatch
from shared.model.errors import RequestError
from shared.model.findings import Outcome, SkipError

CRI2 = '"io.containerd.grpc.v1.cri"'
CRI3 = '"io.containerd.cri.v1.runtime"'
NVIDIA = """
[plugins.{cri}.containerd]
default_runtime_name = "{default}"
[plugins.{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.{cri}.containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
{more}
[plugins.{cri}.containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
"""
CONTAINERD = "etc/containerd/config.toml"
TOOLKIT = "etc/nvidia-container-runtime/config.toml"
CRIO = "etc/crio/crio.conf.d/99-nvidia.conf"
CLOSED = f"{SWITCH} = false\n"


def containerd(cri: str = CRI3, default: str = "runc", more: str = "") -> str:
    return NVIDIA.format(cri=cri, default=default, more=more)


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


ANNOTATED = 'pod_annotations = ["nvidia.cdi.k8s.io/*"]'
OPEN: list[tuple[str, dict[str, str], str, str]] = [
    (
        "NVIDIA's runtime as the default one, as installed",
        {CONTAINERD: containerd(default="nvidia")},
        SWITCH,
        "gives every pod what NVIDIA_VISIBLE_DEVICES names",
    ),
    (
        "of containerd 1.7",
        {CONTAINERD: containerd(CRI2, "nvidia"), TOOLKIT: "# none\n"},
        SWITCH,
        f"{SWITCH} is not false in",
    ),
    (
        "NVIDIA's runtime by class",
        {CONTAINERD: containerd(), TOOLKIT: f"{SWITCH} = true\n"},
        SWITCH,
        "every pod with its runtime class",
    ),
    (
        "in a file that is imported",
        {
            CONTAINERD: 'version = 3\nimports = ["/etc/containerd/more/*.toml"]\n',
            "etc/containerd/more/n.toml": containerd(default="nvidia"),
        },
        SWITCH,
        "every pod what",
    ),
    (
        "in files of several versions, which are merged",
        {
            CONTAINERD: f'version = 3\nimports = ["more/*.toml"]\n[plugins.{CRI3}]\n'
            "enable_cdi = true\n",
            "etc/containerd/more/n.toml": "version = 2\n" + containerd(CRI2, "nvidia"),
        },
        SWITCH,
        "every pod what",
    ),
    (
        "in a file that is imported by a pattern of containerd, which Python does not have",
        {
            CONTAINERD: 'version = 3\nimports = ["/", "/etc/containerd/more/**.toml"]\n',
            "etc/containerd/more/n.toml": containerd(default="nvidia"),
        },
        SWITCH,
        "every pod what",
    ),
    (
        "imported by an imported file",
        {
            CONTAINERD: 'version = 2\nimports = ["/etc/containerd/a.toml"]\n',
            "etc/containerd/a.toml": 'imports = ["b.toml"]\n',
            "etc/containerd/b.toml": containerd(CRI2, "nvidia"),
        },
        SWITCH,
        "every pod what",
    ),
    (
        "in a file of version 1",
        {CONTAINERD: containerd("cri", "nvidia")},
        SWITCH,
        "every pod what",
    ),
    (
        "as the default runtime of early versions",
        {
            CONTAINERD: "[plugins.cri.containerd.default_runtime]\n"
            'runtime_type = "io.containerd.runtime.v1.linux"\n'
            'runtime_engine = "/usr/bin/nvidia-container-runtime"\n'
        },
        SWITCH,
        "every pod what",
    ),
    (
        "in the directory of newest versions",
        {CONTAINERD: "version = 4\n", "etc/containerd/conf.d/99-nvidia.toml": containerd()},
        SWITCH,
        "runtime class",
    ),
    (
        "with the GPU operator's toolkit",
        {
            CONTAINERD: containerd(default="nvidia"),
            "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml": "",
        },
        SWITCH,
        "usr/local/nvidia/toolkit",
    ),
    (
        "annotations of pods",
        {CONTAINERD: containerd(more=ANNOTATED), TOOLKIT: CLOSED},
        "pod_annotations",
        "gets the pod's annotations nvidia.cdi.k8s.io/*",
    ),
    (
        "NVIDIA's runtime as that of CRI-O",
        {
            CRIO: '[crio.runtime]\ndefault_runtime = "nvidia"\n[crio.runtime.runtimes.nvidia]\n'
            'runtime_path = "/usr/bin/nvidia-container-runtime"\n'
        },
        SWITCH,
        "every pod what",
    ),
    (
        "NVIDIA's hook",
        {
            CRIO: "[crio.runtime]\n",
            "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": '{"hook": {"path": '
            '"/usr/bin/nvidia-container-runtime-hook"}}',
        },
        SWITCH,
        "every pod what",
    ),
    (
        "devices of all containers of CRI-O",
        {CRIO: '[crio.runtime]\nadditional_devices = ["/dev/nvidia0:/dev/nvidia0:rw"]\n'},
        "additional_devices",
        "adds /dev/nvidia0:/dev/nvidia0:rw to every container",
    ),
    (
        "CRI-O's annotation",
        {
            "etc/crio/crio.conf": "[crio.runtime]\n"
            'allowed_devices = ["/dev/fuse", "/dev/nvidia0"]\n',
            CRIO: "[crio.runtime.runtimes.crun]\n"
            'allowed_annotations = ["io.kubernetes.cri-o.Devices"]\n',
        },
        "allowed_devices",
        "crun gives pods the devices /dev/nvidia0 for the annotation io.kubernetes.cri-o.Devices",
    ),
    (
        "an NRI plugin",
        {CONTAINERD: "version = 3\n", "opt/nri/plugins/10-device-injector": "program"},
        "nri",
        "the NRI plugins 10-device-injector add devices",
    ),
]


@pytest.mark.parametrize(
    ("files", "name", "text"), [row[1:] for row in OPEN], ids=[row[0] for row in OPEN]
)
def test_an_open_setting_is_reported_with_its_remedy(
    tmp_path: Path, files: dict[str, str], name: str, text: str
) -> None:
    found = open_settings(write(tmp_path, files))

    assert [one.name for one in found] == [name]
    finding = judge_open_settings(found)
    assert finding.outcome is Outcome.WARN
    assert text in finding.text
    assert finding.fix.endswith("see docs/install.md, step 2")


@pytest.mark.parametrize(
    "files",
    [
        {CONTAINERD: 'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = true\n'},
        {CONTAINERD: containerd(default="nvidia"), TOOLKIT: CLOSED},
        {CONTAINERD: "version = 3\n", TOOLKIT: f"{SWITCH} = true\n"},
        {CONTAINERD: containerd(more='container_annotations = ["cdi.k8s.io/*"]'), TOOLKIT: CLOSED},
        {CRIO: '[crio.runtime]\nallowed_devices = ["/dev/nvidia0"]\n'},
        {
            CONTAINERD: '[plugins."io.containerd.nri.v1.nri"]\ndisable = true\n',
            "opt/nri/plugins/10-device-injector": "program",
        },
    ],
    ids=[
        "CDI with runc", "ignored by the switch", "no runtime that reads the variable",
        "annotations of the kubelet", "devices that no annotation names", "NRI is disabled",
    ],
)  # fmt: skip
def test_a_closed_runtime_has_none(tmp_path: Path, files: dict[str, str]) -> None:
    assert judge_open_settings(open_settings(write(tmp_path, files))).outcome is Outcome.OK


def test_where_the_nodes_settings_are_not_visible_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(SkipError, match="not visible"):
        open_settings(write(tmp_path, {TOOLKIT: ""}))


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.toml is not TOML"):
        open_settings(write(tmp_path, {CONTAINERD: "a = ["}))


async def test_the_agent_logs_an_open_setting_once_and_shows_it_as_a_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = RuntimeWatch(write(tmp_path, {CONTAINERD: containerd(default="nvidia")}))

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value("leasehold_agent_open_runtime", {"setting": name})

    with caplog.at_level(logging.WARNING):
        await watch.check()
        await watch.check()
    assert caplog.text.count("gives every pod what NVIDIA_VISIBLE_DEVICES names") == 1
    assert value(SWITCH) == 1

    write(tmp_path, {TOOLKIT: CLOSED})
    await watch.check()
    assert value(SWITCH) is None

    write(tmp_path, {CONTAINERD: "a = ["})
    await watch.check()
    assert value("unreadable") == 1
