"""Starts a program where it finds the mounts of its container; `processes` runs this file.

In a mount namespace of its own, the program's root has everything of this machine, with the mounts
at their places. Directories that lack the place of a mount are made anew in memory, around what is
in them. Or it can write to some places only. It imports only the standard library, without site
packages: it runs at each start.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import sys
import termios
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

NEW_NAMESPACE = 0x20000
NEW_USERS = 0x10000000
NO_SUID = 2
NO_DEVICES = 4
NO_PROGRAMS = 8
READ_ONLY = 1
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
UNBINDABLE = 1 << 17
PRIVATE = 1 << 18
MOUNT_SETATTR = 442
AT_WORKING_DIRECTORY = -100
AT_RECURSIVE = 0x8000
SCRATCH = "/tmp/"  # noqa: S108 - what lacks there is made on this machine
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str | None, target: str, flags: int, *, kind: str | None = None) -> None:
    """Show what a kind of file system has, or a source, at a target; raises OSError."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], flags, None), f"mount {target}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show a file or directory at another place, with what is mounted in it."""
    mount(source, target, BIND | RECURSIVE)
    if read_only:  # what is forbidden already must stay so
        kept = os.statvfs(target).f_flag & (NO_SUID | NO_DEVICES | NO_PROGRAMS)
        mount(None, target, REMOUNT | BIND | READ_ONLY | kept)


def fill(source: str, target: str, lacking: Collection[str], hidden: Collection[str]) -> None:
    """Bind what a directory has into an empty one; make those anew that lack a place below."""
    for entry in os.scandir(source):
        place = Path(target, entry.name)
        if entry.path in hidden:
            continue
        if entry.is_symlink():
            place.symlink_to(Path(entry.path).readlink())
        elif not entry.is_dir(follow_symlinks=False):
            place.touch()
            bind(entry.path, str(place))
        elif any(path.startswith(f"{entry.path}/") for path in (*lacking, *hidden)):
            status = entry.stat()
            place.mkdir()
            with contextlib.suppress(OSError):  # of a user that is not in the namespace
                os.chown(place, status.st_uid, status.st_gid)
            place.chmod(status.st_mode & 0o7777)
            fill(entry.path, str(place), lacking, hidden)
        else:
            place.mkdir()
            bind(entry.path, str(place))


def make_place(path: Path, *, directory: bool) -> None:
    """Make an empty file or directory to mount on, unless there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if directory:
        path.mkdir(exist_ok=True)
    elif not path.exists():
        path.touch()


def enter_users() -> None:
    """Enter a mount namespace as any user may, by one of users that has this user only."""
    user = os.geteuid()
    group = os.getegid()
    _checked(_libc.unshare(NEW_NAMESPACE | NEW_USERS), "unshare")
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"{user} {user} 1")
    (own / "gid_map").write_text(f"{group} {group} 1")


def enter(
    root: str,
    mounts: Sequence[tuple[str, str, bool]],
    hidden: Collection[str],
    *,
    own_users: bool,
) -> None:
    """Enter a mount namespace whose root is made at `root`, an empty directory."""
    lacking = [
        place
        for place, _, _ in mounts
        if not place.startswith(SCRATCH) and not Path(place).exists()
    ]
    if own_users:
        enter_users()
    else:
        _checked(_libc.unshare(NEW_NAMESPACE), "unshare")
    mount(None, "/", RECURSIVE | PRIVATE)
    mount("tmpfs", root, 0, kind="tmpfs")
    mount(None, root, UNBINDABLE)  # it is not bound into itself
    fill("/", root, lacking, hidden)
    os.chroot(root)
    os.chdir("/")
    for place, source, read_only in mounts:
        make_place(Path(place), directory=Path(source).is_dir())
        bind(source, place, read_only=read_only)


class MountAttributes(ctypes.Structure):
    """What `mount_setattr(2)` changes."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "users"))


def set_read_only(place: str, value: bool, *, below: bool = False) -> None:
    """Forbid or allow writing to a mount, and to all below it; raises OSError."""
    flag = MountAttributes(set=value, clear=not value)
    size = ctypes.c_size_t(ctypes.sizeof(flag))
    where = ctypes.c_int(AT_WORKING_DIRECTORY)
    flags = ctypes.c_uint(AT_RECURSIVE * below)
    result = _libc.syscall(
        MOUNT_SETATTR, where, os.fsencode(place), flags, ctypes.byref(flag), size
    )
    _checked(result, f"mount_setattr {place}")


def confine(places: Sequence[tuple[str, str]], *, own_users: bool) -> None:
    """Enter a mount namespace in which only these places, each a source's, can be written."""
    if own_users:
        enter_users()
    else:
        _checked(_libc.unshare(NEW_NAMESPACE), "unshare")
    mount(None, "/", RECURSIVE | PRIVATE)
    sources = [os.open(source, os.O_PATH) for _, source in places]
    for (place, _), source in zip(places, sources, strict=True):  # one may hide another's source
        make_place(Path(place), directory=Path(f"/proc/self/fd/{source}").is_dir())
        bind(f"/proc/self/fd/{source}", place)
        os.close(source)
    set_read_only("/", True, below=True)
    for place, _ in places:
        set_read_only(place, False)


def prepare(spec: dict[str, Any]) -> None:
    """Make this process's surroundings those of the program."""
    if spec["tty"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if spec["root"]:
        enter(spec["root"], spec["mounts"], spec["hidden"], own_users=spec["own_users"])
    elif spec["writable"]:
        confine(spec["writable"], own_users=spec["own_users"])
    os.chdir(spec["directory"])


def main() -> None:
    """Read what to start from a file; write to another one why it cannot be started."""
    with os.fdopen(int(sys.argv[1])) as file:
        spec = json.load(file)
    errors = int(sys.argv[2])
    os.set_inheritable(errors, False)
    command = spec["command"]
    try:
        prepare(spec)
    except OSError as error:
        _end(errors, f"{error.filename or 'terminal'}: {error.strerror}")
    try:
        os.execvpe(command[0], command, spec["environment"])  # noqa: S606 - to be this program
    except FileNotFoundError:
        _end(errors, f'exec: "{command[0]}": executable file not found in $PATH')
    except OSError as error:
        _end(errors, f'exec: "{command[0]}": {error.strerror}')


def _end(errors: int, why: str) -> None:
    os.write(errors, why.encode())
    sys.exit(1)


if __name__ == "__main__":
    main()
