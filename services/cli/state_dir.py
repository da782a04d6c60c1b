"""The state directory: where everything of one `leasehold up` lives, and who runs it.

`lock` is held (flock) by the supervisor as long as it lives and names its process; the kernel
lets go of it whatever way the supervisor ends. `state.json` tells the other commands where things
are.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.errors import LeaseholdError, RequestError

FORMAT = 1
MARK = "LEASEHOLD_SUPERVISED"
"""Environment variable of every process under the supervisor; its value is the state directory."""


class AlreadyRunningError(LeaseholdError):
    """Somebody runs this state directory now."""


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths below one directory."""

    root: Path

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the directory at `path`, which need not exist."""
        return cls(Path(os.path.abspath(path)))  # noqa: PTH100 - a symlink stays one

    @property
    def lock(self) -> Path:
        """Locked by the supervisor, and holds its process id."""
        return self.root / "lock"

    @property
    def state(self) -> Path:
        """What other commands read."""
        return self.root / "state.json"

    @property
    def kubeconfig(self) -> Path:
        """How to reach the simulated cluster."""
        return self.root / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One log per part, and the one before it as `.log.1`."""
        return self.root / "logs"

    @property
    def traces(self) -> Path:
        """Finished spans, one file per replica."""
        return self.root / "traces"

    @property
    def doors(self) -> Path:
        """Who may what at NATS and Redis, and everybody's secrets."""
        return self.root / "doors"

    def log(self, part: str) -> Path:
        """Return the log of a part."""
        return self.logs / f"{part}.log"

    def run_file(self, part: str) -> Path:
        """Return the file that a service writes once it is ready."""
        return self.root / "run" / f"{part}.json"

    def agent(self, node: str) -> Path:
        """Return the directory of a node's agent."""
        return self.root / "agents" / node

    def node(self, node: str) -> Path:
        """Return the directory of a node's simulated kubelet."""
        return self.root / "nodes" / node

    def make(self) -> None:
        """Make the directories. Raises RequestError if they cannot be made."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("logs", "traces", "run", "nats", "valkey", "agents"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"{self.root} cannot hold the state ({error.strerror}); choose another --state"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """One process, as `state.json` shows it."""

    name: str
    pid: int | None = None
    address: str = ""
    log: str = ""
    ready: bool = False
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything `state.json` says."""

    pid: int
    started_at: float
    ready: bool
    nats_url: str
    redis_url: str
    kubeconfig: str
    nodes: Mapping[str, str]
    """Name of each simulated node and its layout."""
    nats_credentials: str = ""
    """File with the user and secret by which commands listen; empty: NATS asks for none."""
    nats_ca: str = ""
    """Authority of the certificate of the NATS that `up` started; empty: it has none."""
    redis_credentials: str = ""
    """Likewise for reading the ledger."""
    ports: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[PartState, ...] = ()
    format: int = FORMAT

    @property
    def nats_keys(self) -> ClientCredentials:
        """By what commands listen at NATS."""
        return ClientCredentials(
            credentials=Path(self.nats_credentials) if self.nats_credentials else None,
            tls=TlsFiles(ca=Path(self.nats_ca) if self.nats_ca else None),
        )


def save_state(directory: StateDir, state: State) -> None:
    """Replace `state.json` in one step."""
    draft = directory.state.with_suffix(".new")
    draft.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    draft.replace(directory.state)


def load_state(directory: StateDir) -> State | None:
    """Read `state.json`, or return None if there is none that we can read."""
    try:
        found: dict[str, Any] = json.loads(directory.state.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            return None
        parts = tuple(PartState(**part) for part in found.pop("parts"))
        return State(**found, parts=parts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


@contextlib.contextmanager
def locked(directory: StateDir) -> Iterator[None]:
    """Hold the lock, with our process id in it.

    Raises AlreadyRunningError naming who holds it.
    """
    with directory.lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = _pid_in(directory) or "unknown"
            raise AlreadyRunningError(
                f"{directory.root} is in use: process {pid} runs it already; look with "
                f"`leasehold ps --state {directory.root}`, end it with `leasehold down --state "
                f"{directory.root}`, or give another --state"
            ) from error
        write_holder(directory)
        yield


def write_holder(directory: StateDir) -> None:
    """Note our own process id in the lock; a process that inherited the lock calls it again."""
    directory.lock.write_text(f"{os.getpid()}\n", encoding="utf-8")


def holder(directory: StateDir) -> int | None:
    """Return the process that runs this directory now, or None if nobody does."""
    try:
        with directory.lock.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(directory) or 0
    except OSError:
        return None
    return None


def wipe(directory: StateDir) -> None:
    """Remove everything but the lock. Raises RequestError if the directory is not one of ours."""
    found = {path.name for path in directory.root.iterdir()}
    if (
        found - {"lock", "logs", "traces", "run", "nats", "valkey", "agents", "doors"}
        and "state.json" not in found
    ):
        raise RequestError(
            f"{directory.root} holds {', '.join(sorted(found)[:5])} and no state.json: it is not a "
            "state directory, so --fresh does not empty it; choose another --state"
        )
    for path in directory.root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _pid_in(directory: StateDir) -> int | None:
    text = directory.lock.read_text(encoding="utf-8").strip()
    return int(text) if text.isdecimal() else None
