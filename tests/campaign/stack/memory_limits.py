"""The driver's limits of memory on a campaign's nodes: cgroups, the driver's version, its limits.

The simulated kubelets make no cgroups and call no hooks: pods get theirs here, and are limited as a
whole.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.state_dir import StateDir
from services.node_agent.memory_limits.build_hook import build_hook
from shared.model.errors import UnavailableError
from simcluster.gpu_driver.control import control
from simcluster.node_agent.driver import STATE
from tests.campaign.schedule import ACCOUNTING, NODES
from tests.support.cgroups import CgroupTree, pod_path

_MIB = 1 << 20
HOOK = "limit-hook"
TOO_OLD = "none"
"""The accounting of a driver that sets no limits."""


@dataclass(kw_only=True)
class MemoryLimits:
    directory: StateDir
    hook: Path | None = None
    """None without a C compiler: then the driver limits nothing."""
    pods: set[str] = field(default_factory=set)
    """UIDs of pods with cgroups."""

    @classmethod
    def prepare(cls, directory: StateDir) -> "MemoryLimits":
        """Build the hook, and make the root of each node's cgroups."""
        limits = cls(directory=directory)
        with contextlib.suppress(UnavailableError):
            limits.hook = build_hook(directory.root / HOOK)
        for node in NODES:
            limits._tree(node).make("kubepods.slice")
        return limits

    def flags(self, node: str) -> tuple[str, ...]:
        """Return the flags of a node's agent."""
        if self.hook is None:
            return ()
        return (
            *("--cgroup-root", str(self._tree(node).root)),
            *("--limit-hook", str(self.hook)),
            *("--device-list-strategy", "cdi-cri"),
        )

    def make_pod(self, uid: str) -> None:
        """Make a pod's cgroup on each node, where it stays: kubelets remove theirs later."""
        self.pods.add(uid)
        for node in NODES:
            self._tree(node).make_pod(uid)

    def replace_driver(self, node: str, *, is_old: bool) -> None:
        """Load the last driver without limits, or the one with them, in place of the other."""
        self._control(node, "accounting", TOO_OLD if is_old else ACCOUNTING[node])
        self.lose(node)

    def lose(self, node: str) -> None:
        self._control(node, "forget-limits")

    def fail(self, node: str, code: int) -> None:
        """Have NVML return an error for limits; 0 ends that."""
        self._control(node, "limits-error", str(code))

    def keep(self, node: str, *, kept: bool) -> None:
        """Have the driver lower no limit, as if more were in use, or end that."""
        self._control(node, "keep-limits", str(int(kept)))

    def read(self) -> dict[tuple[str, str], int]:
        """Return the limits in MiB of pods, by UID and device."""
        uids = {Path(pod_path(uid)).name: uid for uid in self.pods}
        limits: dict[tuple[str, str], int] = {}
        for node in NODES:
            for line in self._control(node, "limits").splitlines():
                words = line.split()
                name = Path(words[2]).name if words[0] == "limit" else ""
                if name in uids:
                    limits[uids[name], words[1]] = int(words[words.index("hard") + 1]) // _MIB
        return limits

    def _tree(self, node: str) -> CgroupTree:
        return CgroupTree(root=self.directory.node(node) / "cgroups")

    def _control(self, node: str, *command: str) -> str:
        state = self.directory.gpus(node) / STATE
        return control(state, *command) if self.hook is not None and state.exists() else ""
