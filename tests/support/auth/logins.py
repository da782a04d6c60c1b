"""Files with the logins of all services and of two nodes' agents."""

import tempfile
from collections.abc import Iterator
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
