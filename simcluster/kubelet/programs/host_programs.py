"""Containers that are processes of this machine, whatever their command, on its own GPUs.

They have the environment of this process, as that of an image, and over it what the pod and the
device plugins set. As root they have the mounts in a namespace of their own; otherwise, or where
this machine forbids namespaces, a library that the container would preload is preloaded.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from simcluster.kubelet.containers.container_env import PATH
from simcluster.kubelet.containers.container_state import ContainerState
from simcluster.kubelet.programs.gpu_programs import hidden_files, preloaded
from simcluster.kubelet.programs.processes import Launch, StartError, start_process
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
        return host_launch(state, command, root=self._root if self._isolates else None)

    @cached_property
    def _isolates(self) -> bool:
        """Whether processes can have mounts of their own."""
        self._root.mkdir(parents=True, exist_ok=True)
        try:
            if os.geteuid():
                raise StartError("this user is not root")  # noqa: TRY301
            probe = host_launch(ContainerState(), ["true"], root=self._root)
            start_process(probe).communicate()
        except StartError as error:
            logger.warning("containers have their mounts only by LD_PRELOAD: %s", error)
            return False
        return True

    def not_run(self, image: str, command: Sequence[str]) -> str:
        """Say for a container's log why nothing is started."""
        return f"nothing runs here: image {image} is ignored, and the container sets no command"

    def pulled(self, image: str) -> str:
        """Say for an Event what became of the image."""
        return f'Image "{image}" is ignored: the container is its command, a process of this host'


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
