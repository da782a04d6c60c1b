"""Archives whose bytes depend on nothing but their files and one time; pure."""

import gzip
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One file of an archive."""

    name: str
    content: bytes
    executable: bool = False


def tar_gz(files: Iterable[ArchivedFile], built_at: int) -> bytes:
    """Return the files as a tar archive, compressed by gzip; `built_at` is in Unix seconds."""
    packed = io.BytesIO()
    # mtime: gzip's header has the time, too.
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=built_at) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in files:
            entry = tarfile.TarInfo(file.name)
            entry.size = len(file.content)
            entry.mtime = built_at
            entry.mode = 0o755 if file.executable else 0o644
            archive.addfile(entry, io.BytesIO(file.content))
    return packed.getvalue()
