"""A directory tree that stands for a node's cgroups, version 2."""

from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("cpu", "memory", "pids", "misc", "dmem")
SYSTEMD = "systemd"
CGROUPFS = "cgroupfs"


@dataclass(frozen=True, kw_only=True)
class CgroupTree:
    """The files that the kernel makes in each directory; a process is one by its PID there."""

    root: Path
    controllers: tuple[str, ...] = CONTROLLERS

    def make(self, name: str = "") -> Path:
        """Make a cgroup, and those above it."""
        path = self.root / name
        for directory in reversed([path, *path.parents]):
            if directory.is_relative_to(self.root) and not (directory / "cgroup.procs").exists():
                directory.mkdir(exist_ok=True, parents=True)
                (directory / "cgroup.controllers").write_text(f"{' '.join(self.controllers)}\n")
                self.enable(directory, *self.controllers)
                (directory / "cgroup.procs").write_text("")
        return path

    def enable(self, directory: Path, *controllers: str) -> None:
        """Give the cgroups below a directory these controllers, and no others."""
        (directory / "cgroup.subtree_control").write_text(f"{' '.join(controllers)}\n")

    def make_pod(self, uid: str, *, driver: str = SYSTEMD, qos: str = "burstable") -> Path:
        """Make a pod's cgroup, as a kubelet with this cgroup driver does."""
        return self.make(pod_path(uid, driver=driver, qos=qos))

    def make_container(self, pod: Path, container_id: str, *, runtime: str = "containerd") -> Path:
        """Make a container's cgroup, as this runtime does."""
        names = {"containerd": f"cri-containerd-{container_id}.scope"}
        names["cri-o"] = f"crio-{container_id}.scope"
        systemd = pod.name.endswith(".slice")
        name = names[runtime] if systemd else container_id
        return self.make(str(pod.relative_to(self.root) / name))


def pod_path(uid: str, *, driver: str = SYSTEMD, qos: str = "burstable") -> str:
    """Return the path of a pod's cgroup below the root; `qos` is empty for guaranteed pods."""
    if driver == CGROUPFS:
        return "/".join(("kubepods", *((qos,) if qos else ()), f"pod{uid}"))
    name = uid.replace("-", "_")
    if not qos:
        return f"kubepods.slice/kubepods-pod{name}.slice"
    return f"kubepods.slice/kubepods-{qos}.slice/kubepods-{qos}-pod{name}.slice"
