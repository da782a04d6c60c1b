"""Settings of the container runtime by which pods can get GPUs that they do not lease."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shared.dialects.reserved import VISIBLE
from shared.model.errors import RequestError
from shared.model.findings import Finding, SkipError, ok, warn

SWITCH = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS_SWITCH = "accept-nvidia-visible-devices-as-volume-mounts"
CONFIGURE = "nvidia-ctk config --in-place --set"
TOOLKIT_FILES = (
    "etc/nvidia-container-runtime/config.toml",
    "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
)
"""The second is the GPU operator's."""
CONTAINERD_FILES = (
    "etc/containerd/config.toml",
    "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
)
"""The second is k3s'."""
IMPORTED = "etc/containerd/conf.d/*.toml"
CRIO_FILES = ("etc/crio/crio.conf", "etc/crio/crio.conf.d/*")
HOOK_FILES = ("usr/share/containers/oci/hooks.d/*.json", "etc/containers/oci/hooks.d/*.json")
PLUGIN_FILES = "opt/nri/plugins/*"
CRI_SECTION = "io.containerd.cri.v1.runtime"
EARLIER_CRI_SECTIONS = ("cri", "io.containerd.grpc.v1.cri")
"""In files of version 1 and 2, which newer versions of containerd merge with version 3."""
NRI_SECTION = "io.containerd.nri.v1.nri"
CRIO_DEVICES = "io.kubernetes.cri-o.Devices"
ANNOTATIONS = ("cdi.k8s.io/pod", "nvidia.cdi.k8s.io/pod")
"""By which NVIDIA's runtime adds devices; the part after the slash is free."""
INJECTORS = ("device-injector", "cdi", "nvidia")
"""In the names of NRI plugins that add the devices which annotations name."""
MAX_IMPORTS = 64
MAX_BYTES = 1 << 20
_STARS = re.compile(r"\*+")
"""Of containerd's patterns, in which `**` is no more than `*`."""
_NVIDIA = "nvidia"
_GPU = "/dev/nvidia"

RUNTIME_DIRECTORIES = ("etc/containerd", "etc/crio", "var/lib/rancher/k3s")

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OpenSetting:
    name: str
    text: str
    remedy: str


def open_settings(host: Path) -> list[OpenSetting]:
    """Raises RequestError for a file that is not TOML, OSError, or SkipError without settings."""
    if not any((host / directory).is_dir() for directory in RUNTIME_DIRECTORIES):
        places = " or ".join(f"{host / directory}" for directory in RUNTIME_DIRECTORIES[:2])
        raise SkipError(f"the settings of containerd or CRI-O are not visible at {places}")
    containerd = _merged(_of_containerd(path) for path in _containerd_files(host))
    crio = _merged(map(_parsed, _existing(host, CRIO_FILES)))
    hooks = [path for path in _existing(host, HOOK_FILES) if _NVIDIA in _text(path)]
    return [
        *_nvidia_runtime(
            host, [*_runtimes_of_containerd(containerd), *_runtimes_of_crio(crio)], hooks
        ),
        *_crio(crio),
        *_plugins(host, containerd),
    ]


def judge_open_settings(settings: Iterable[OpenSetting]) -> Finding:
    listed = list(settings)
    if not listed:
        return ok("the container runtime gives pods no GPUs but those of device plugins and claims")
    return warn(
        "pods can get GPUs without a lease: " + "; ".join(setting.text for setting in listed),
        "; ".join(dict.fromkeys(setting.remedy for setting in listed))
        + "; see docs/install.md, step 2",
    )


@dataclass(frozen=True, slots=True)
class _Runtime:
    name: str
    program: str
    is_default: bool
    annotations: tuple[str, ...] = ()

    @property
    def is_nvidia(self) -> bool:
        return _NVIDIA in self.name or _NVIDIA in self.program


def _nvidia_runtime(
    host: Path, runtimes: Iterable[_Runtime], hooks: Iterable[Path]
) -> Iterator[OpenSetting]:
    reached = [runtime for runtime in runtimes if runtime.is_nvidia]
    hooked = list(hooks)
    if not reached and not hooked:
        return
    files = _existing(host, TOOLKIT_FILES)
    settings = _parsed(files[0]) if files else {}
    by_default = hooked or any(runtime.is_default for runtime in reached)
    who = "every pod" if by_default else "every pod with its runtime class"
    if settings.get(SWITCH, True):
        where = files[0] if files else TOOLKIT_FILES[0]
        yield OpenSetting(
            SWITCH,
            f"NVIDIA's runtime gives {who} what {VISIBLE} names, also in the image: "
            f"{SWITCH} is not false in {where}",
            f"pass devices by CDI, then {CONFIGURE} {SWITCH}=false",
        )
    for runtime in reached:
        open_to = [
            pattern
            for pattern in runtime.annotations
            if any(fnmatch(annotation, pattern) for annotation in ANNOTATIONS)
        ]
        if open_to:
            yield OpenSetting(
                "pod_annotations",
                f"runtime {runtime.name} gets the pod's annotations {', '.join(open_to)}, which "
                "name CDI devices",
                f"remove them from pod_annotations of runtime {runtime.name} in containerd's file",
            )


def _crio(settings: Settings) -> Iterator[OpenSetting]:
    runtime = _tables(settings, "crio", "runtime")
    added = [text for text in _texts(runtime.get("additional_devices")) if _GPU in text]
    if added:
        yield OpenSetting(
            "additional_devices",
            f"CRI-O adds {', '.join(added)} to every container",
            "remove them from additional_devices of CRI-O",
        )
    allowed = [text for text in _texts(runtime.get("allowed_devices")) if _GPU in text]
    handlers = {**_tables(runtime, "runtimes"), **_tables(runtime, "workloads")}
    accepting = [
        name
        for name, handler in handlers.items()
        if any(
            CRIO_DEVICES.startswith(text) and text
            for text in _texts(handler.get("allowed_annotations"))
        )
    ]
    if allowed and accepting:
        yield OpenSetting(
            "allowed_devices",
            f"CRI-O's {', '.join(sorted(accepting))} gives pods the devices {', '.join(allowed)} "
            f"for the annotation {CRIO_DEVICES}",
            f"remove {CRIO_DEVICES} from allowed_annotations, or GPUs from allowed_devices",
        )


def _plugins(host: Path, containerd: Settings) -> Iterator[OpenSetting]:
    """Others connect to the runtime, and leave no file."""
    if _tables(containerd, "plugins", NRI_SECTION).get("disable") is True:
        return
    names = [path.name for path in _existing(host, (PLUGIN_FILES,))]
    injectors = [name for name in names if any(part in name for part in INJECTORS)]
    if injectors:
        yield OpenSetting(
            "nri",
            f"the NRI plugins {', '.join(injectors)} add devices that a pod's annotations name",
            f"remove them from /{PLUGIN_FILES.rpartition('/')[0]}, or disable NRI",
        )


def _runtimes_of_containerd(settings: Settings) -> list[_Runtime]:
    section = _tables(settings, "plugins", CRI_SECTION, "containerd")
    default = str(section.get("default_runtime_name", "runc"))
    runtimes = dict(_tables(section, "runtimes"))
    if _tables(section, "default_runtime").get("runtime_type"):  # of containerd before 2
        default = "default"
        runtimes[default] = section["default_runtime"]
    return [
        _Runtime(name, _program(runtime), name == default, _texts(runtime.get("pod_annotations")))
        for name, runtime in runtimes.items()
    ]


def _program(runtime: Settings) -> str:
    options = _tables(runtime, "options")
    programs = options.get("BinaryName"), options.get("Runtime"), runtime.get("runtime_engine")
    return next((str(program) for program in programs if program), "")


def _runtimes_of_crio(settings: Settings) -> list[_Runtime]:
    section = _tables(settings, "crio", "runtime")
    default = section.get("default_runtime", "")
    return [
        _Runtime(name, str(runtime.get("runtime_path", "")), name == default)
        for name, runtime in _tables(section, "runtimes").items()
    ]


def _tables(settings: Settings, *path: str) -> Settings:
    for key in path:
        inner = settings.get(key)
        settings = inner if isinstance(inner, Mapping) else {}
    return settings


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _containerd_files(host: Path) -> list[Path]:
    """Return the files in the order in which they count."""
    files = _existing(host, CONTAINERD_FILES)[:1]
    pending = [*files, *_existing(host, (IMPORTED,))]
    read: dict[Path, None] = {}
    while pending and len(read) < MAX_IMPORTS:
        path = pending.pop(0)
        if path in read:
            continue
        read[path] = None
        beside = path.parent.relative_to(host)
        imports = (_STARS.sub("*", text) for text in _texts(_parsed(path).get("imports")))
        pending += _existing(host, (str(beside / text).lstrip("/") for text in imports))
    return list(read)


def _existing(host: Path, patterns: Iterable[str]) -> list[Path]:
    paths = (path for pattern in filter(None, patterns) for path in sorted(host.glob(pattern)))
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def _of_containerd(path: Path) -> Settings:
    settings = dict(_parsed(path))
    plugins = dict(_tables(settings, "plugins"))
    for name in EARLIER_CRI_SECTIONS:
        if name in plugins:
            plugins.setdefault(CRI_SECTION, plugins.pop(name))
    return {**settings, "plugins": plugins}


def _merged(files: Iterable[Settings]) -> Settings:
    merged: dict[str, Any] = {}
    for settings in files:
        _merge(merged, settings)
    return merged


def _merge(into: dict[str, Any], settings: Settings) -> None:
    for key, value in settings.items():
        before = into.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value)
        else:
            into[key] = value


def _parsed(path: Path) -> Settings:
    try:
        return tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RequestError(f"{path} is not TOML: {error}") from error


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode(errors="replace")
