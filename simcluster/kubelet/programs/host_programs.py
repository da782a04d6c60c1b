"""Containers that are processes of this machine, whatever their command, on its own GPUs.

They have the environment of this process, as that of an image, and over it what the pod and the
device plugins set, and the mounts in a namespace of their own. Where this machine forbids that to
this user, a library that the container would preload is preloaded by a variable.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from simcluster.kubelet.containers.container_env import PATH
from simcluster.kubelet.containers.container_state import ContainerState
from simcluster.kubelet.programs.gpu_programs import hidden_files, preloaded
from simcluster.kubelet.programs.processes import Launch, Namespaces, possible_namespaces
from simcluster.kubelet.settings import NodeFiles

logger = logging.getLogger(__name__)

_OURS = "LEASEHOLD_"
"""Prefix of variables of this process that are not passed on."""


class HostPrograms:
    """All programs of this machine."""

    def __init__(self, files: NodeFiles) -> None:
        self._root = files.root / "root"

    def has(self, command: Sequence[str], *, built_in: bool) -> bool:
        """Return whether a container has a command at all."""
        return bool(command)

    def launch(self, state: ContainerState, command: Sequence[str]) -> Launch:
        """Return how a command is started."""
        return self._launch(state, command, self.namespaces)

    def _launch(
        self, state: ContainerState, command: Sequence[str], namespaces: Namespaces
    ) -> Launch:
        self._root.mkdir(parents=True, exist_ok=True)
        launch = host_launch(state, command, root=self._root if namespaces else None)
        return replace(launch, own_users=namespaces is Namespaces.OF_ANY_USER)

    @cached_property
    def namespaces(self) -> Namespaces:
        """The namespaces that processes can have here."""
        namespaces = possible_namespaces(partial(self._launch, ContainerState(), ["true"]))
        if not namespaces:
            logger.warning("containers have their mounts only by LD_PRELOAD")
        return namespaces

    def not_run(self, image: str, command: Sequence[str]) -> str:
        """Say for a container's log why nothing is started."""
        return f"nothing runs here: image {image} is ignored, and the container sets no command"

    def pulled(self, image: str) -> str:
        """Say for an Event what became of the image."""
        limits = "" if self.namespaces else "; a program that removes LD_PRELOAD has no limits"
        return f'Image "{image}" is ignored: its command is a process of this host{limits}'

    def outlive(self, state: ContainerState) -> bool:
        """Return False: the processes are as real as their GPUs."""
        return False


def host_launch(state: ContainerState, command: Sequence[str], *, root: Path | None) -> Launch:
    """Return how a command is started with a container's environment and mounts.

    With an empty directory as `root`, in a mount namespace; else by variables, which is weaker.
    """
    image = {name: text for name, text in os.environ.items() if not name.startswith(_OURS)}
    own = dict(state.env) if root else preloaded(state)
    if own.get("PATH") == PATH:
        del own["PATH"]
    if root is None:
        _make_scratch(state)
    return Launch(
        command=command,
        environment=image | own,
        directory=Path(state.directory) if state.directory else Path.cwd(),
        root=root,
        mounts=tuple(state.mounts),
        hidden=hidden_files(state) if root else (),
    )


def _make_scratch(state: ContainerState) -> None:
    """Make the container's directories for temporary files, where libraries keep their locks."""
    for mount in state.mounts:
        place = Path(mount.container_path)
        if place.parent == Path(tempfile.gettempdir()) and Path(mount.host_path).is_dir():
            place.mkdir(exist_ok=True)
