"""The state directory of one `leasehold up`: its paths, its lock, its `state.json`.

The supervisor holds `lock` (flock), with its process id: the kernel releases it however the
supervisor ends.
"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from services.cli.arguments import ClusterArguments, StateArguments
from services.cli.terminal import program
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError, UnavailableError

FORMAT = 1
SUPERVISED_VARIABLE = "LEASEHOLD_SUPERVISED"
"""Its value is the state directory; set in every process under the supervisor."""
LOCAL = "local"
MAX_ROOT_BYTES = 107 - len("/nodes/node-999/device-plugins/") - 36
"""The kernel takes 107 bytes as the path of a unix socket."""


LOOK_AGAIN_S = 0.01
"""The pause while other commands look at the lock of a state directory, each for a moment."""


class AlreadyRunningError(LeaseholdError):
    pass


class StateDir:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / "lock"
        self.state = root / "state.json"
        self.kubeconfig = root / "kubeconfig"
        self.first_pod = root / "first-pod.yaml"
        self.installation = root / "installation.json"
        self.accounts = root / "accounts"
        self.scheduler_configuration = root / "kube-scheduler.yaml"
        self.traces = root / "traces"
        self.agents = root / "agents"
        self.credentials = root / "credentials"

    @classmethod
    def at(cls, path: Path) -> Self:
        return cls(Path(os.path.abspath(path)))  # noqa: PTH100 - a symlink stays one

    @classmethod
    def found(cls, path: Path, kubeconfig: Path | None = None) -> Self:
        """Without `kubeconfig`, KUBECONFIG's directory replaces a default that is absent."""
        directory = cls.at(path)
        if kubeconfig is None and path == StateArguments.state and not directory.root.exists():
            beside = cls.at(Path(os.environ.get("KUBECONFIG", "")).parent)
            return beside if beside.state.exists() else directory
        return directory

    def log(self, component: str) -> Path:
        return self.root / "logs" / f"{component}.log"

    def run_file(self, component: str) -> Path:
        return self.root / "run" / f"{component}.json"

    def agent(self, node: str) -> Path:
        return self.agents / node

    def node(self, node: str) -> Path:
        return self.root / "nodes" / node

    def faults(self, node: str) -> Path:
        return self.node(node) / "faults.json"

    def gpus(self, node: str) -> Path:
        return self.node(node) / "gpus"

    def make(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("logs", "traces", "run", "valkey", "agents"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"{self.root} cannot store the state ({error.strerror}): choose another --state"
            ) from error


class ComponentState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int | None = None
    address: str = ""
    log: str = ""
    ready: bool = False
    restarts: int = 0
    awaited: bool = True
    """It is ready before `up` is."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started_at: float
    ready: bool
    nats_url: str
    redis_url: str
    kubeconfig: str
    nodes: Mapping[str, str]
    """GPU layouts."""
    nats_credentials: str = ""
    """A file, or empty if NATS requires no login."""
    nats_ca: str = ""
    """Empty unless `up` started NATS."""
    redis_credentials: str = ""
    library_source: str = ""
    ports: Mapping[str, int] = {}
    components: tuple[ComponentState, ...] = ()
    format: int = FORMAT

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.get('page', 0)}"


def optional_path(text: str) -> Path | None:
    return Path(text) if text else None


def read_object(path: Path) -> dict[str, Any]:
    """Return an empty one for a file that is absent or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def save_state(directory: StateDir, state: State) -> None:
    temporary = directory.state.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
    temporary.replace(directory.state)


def load_state(directory: StateDir) -> State | None:
    """Return None if there is none of this format.

    Raises UnavailableError if this user may not read it.
    """
    try:
        state = msgspec.json.decode(directory.state.read_bytes(), type=State)
    except PermissionError as error:
        raise UnavailableError(
            f"this user may not read {directory.state}: run the command as the user who ran "
            "`leasehold up`, or name another directory with --state"
        ) from error
    except (OSError, *UNDECODABLE):
        return None
    return state if state.format == FORMAT else None


def stack_of(flags: ClusterArguments) -> tuple[StateDir, State | None]:
    """Return no stack if another cluster counts. Raises UnavailableError if it cannot be read.

    A stack of the default directory that does not run gives way to a KUBECONFIG of another cluster.
    """
    directory = StateDir.found(flags.state, flags.kubeconfig)
    state = load_state(directory)
    if state is None or flags.kubeconfig or flags.state != StateArguments.state:
        return directory, state
    named = os.environ.get("KUBECONFIG", "")
    names_another = named and Path(named).absolute() != Path(state.kubeconfig).absolute()
    if names_another and supervisor_pid(directory) is None:
        return directory, None
    return directory, state


@contextlib.contextmanager
def locked(directory: StateDir) -> Iterator[None]:
    """Raises AlreadyRunningError, which names the process that holds the lock."""
    with directory.lock.open("a+", encoding="utf-8") as file:
        try:
            _lock(file)
        except OSError as error:
            pid = _read_pid(directory) or "unknown"
            flag = f"--state {shlex.quote(str(directory.root))}"
            raise AlreadyRunningError(
                f"{directory.root} is in use by process {pid}: show it with `{program()} status "
                f"{flag}`, stop it with `{program()} down {flag}`, or choose another --state"
            ) from error
        write_supervisor_pid(directory)
        yield


def _lock(file: IO[str]) -> None:
    """Wait for commands that look at the lock. Raises OSError if a supervisor holds it."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(LOOK_AGAIN_S)
        else:
            return


def write_supervisor_pid(directory: StateDir) -> None:
    """A process that inherits the lock calls this again."""
    directory.lock.write_text(f"{os.getpid()}\n", encoding="utf-8")


def supervisor_pid(directory: StateDir) -> int | None:
    """Return the process that holds the lock (0 if unknown), or None."""
    try:
        with directory.lock.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(directory) or 0
    except OSError:
        return None
    return None


def wipe(directory: StateDir) -> None:
    """The lock stays. Raises RequestError if it is not a state directory.

    The file that shows that it is one goes last, as this may be interrupted.
    """
    names = {path.name for path in directory.root.iterdir()}
    own = {"lock", "logs", "traces", "run", "valkey", "agents", "credentials"}
    if names - own and "state.json" not in names:
        raise RequestError(
            f"{directory.root} holds {', '.join(sorted(names)[:5])} and no state.json: it is not a "
            "state directory, so --fresh does not empty it; choose another --state"
        )
    for path in sorted(directory.root.iterdir(), key=directory.state.__eq__):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _read_pid(directory: StateDir) -> int | None:
    text = directory.lock.read_text(encoding="utf-8").strip()
    return int(text) if text.isdecimal() else None


@contextlib.contextmanager
def short_root(directory: StateDir) -> Iterator[StateDir]:
    """Yield a temporary symbolic link if the path is too long for sockets.

    The kernel follows symbolic links in a socket's path.
    """
    if len(os.fsencode(directory.root)) <= MAX_ROOT_BYTES:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="lh-", dir=_short_temporary()) as folder:
        link = Path(folder) / "s"
        link.symlink_to(directory.root, target_is_directory=True)
        yield StateDir(link)


def _short_temporary() -> str:
    temporary = tempfile.gettempdir()
    return temporary if len(os.fsencode(temporary)) <= 20 else "/tmp"  # noqa: S108 - our own folder
