"""Files with the logins of all services and of two nodes' agents."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli import credentials
from services.cli.credentials import CredentialFiles
from shared.model.names import NodeName

NODES = [NodeName("node-a"), NodeName("node.b")]


@contextmanager
def written_logins() -> Iterator[CredentialFiles]:
    """Write what `leasehold credentials` writes, into a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="lh-credentials-") as folder:
        yield credentials.write(Path(folder) / "credentials", NODES)


def covers(patterns: Iterable[str], subject: str) -> bool:
    """Return whether a user with these patterns may publish there."""
    return any(_covers(pattern.split("."), subject.split(".")) for pattern in patterns)


def _covers(pattern: list[str], subject: list[str]) -> bool:
    for index, part in enumerate(pattern):
        if part == ">":
            return len(subject) > index
        if index >= len(subject) or part not in {"*", subject[index]}:
            return False
    return len(pattern) == len(subject)
