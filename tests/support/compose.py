"""`compose.yaml` without containers: the same command lines and variables as processes."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from services.cli.up.servers import nats_program, valkey_program
from tests.support.command_server import COMMAND, Forked
from tests.support.servers.nats import free_port
from tests.support.stack import Done, command
from tests.support.waiting import until

FILE = Path(__file__).parents[2] / "compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
MODULES = ("services.", "simcluster")
ONCE = tuple(
    name
    for name, service in SERVICES.items()
    if service.get("restart") == "no" and "command" in service
)
_HOST = "|".join(map(re.escape, (*SERVICES, "0.0.0.0", "127.0.0.1")))  # noqa: S104 - of a text
_ADDRESS = re.compile(rf"(?:(?<=//)|(?<=[=,])|^(?=[\w.-]+:\d))({_HOST})(?::(\d{{4,5}}))?(?=[,/]|$)")
_PORT_FLAG = re.compile(r"(?<=port=)\d{4,5}$|^\d{4,5}$")
_DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


class Compose:
    """The services of the file, whose volumes are below one directory, on ports of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ports: defaultdict[tuple[str, str], int] = defaultdict(free_port)
        self.processes: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def words(self, service: str) -> list[str]:
        """Return the command of a service as it runs here."""
        words = [self._local(service, word) for word in SERVICES[service].get("command", ())]
        if service == "nats":
            address = f"--port={self.ports['nats', '4222']}"
            return [nats_program(), *words, "--addr=127.0.0.1", address]
        if service == "redis":  # the server of the wheel has no TLS
            flags = zip(words[1::2], words[2::2], strict=True)
            kept = [
                pair for pair in flags if not pair[0].startswith("--tls") and pair[0] != "--port"
            ]
            port = ("--port", str(self.ports["redis", "6379"]))
            here = (port, ("--bind", "127.0.0.1"), ("--dir", str(self.root)))
            return [valkey_program(), *(word for pair in (*kept, *here) for word in pair)]
        return words

    def environment(self, service: str) -> dict[str, str]:
        """Return the variables of a service, without a collector of traces and TLS of Redis."""
        given = SERVICES[service].get("environment", {})
        made = {name: self._local(service, text) for name, text in given.items()}
        for name in ("LEASEHOLD_OTLP_ENDPOINT", "LEASEHOLD_REDIS_CA_FILE"):
            made.pop(name, None)
        if url := made.get("LEASEHOLD_REDIS_URL"):
            made["LEASEHOLD_REDIS_URL"] = url.replace("rediss:", "redis:")
        return made

    def kubeconfig(self, service: str) -> Path | None:
        """Return the file with the token of a service at the API server, if it has one."""
        text = self.environment(service).get("LEASEHOLD_KUBECONFIG", "")
        return Path(text) if text else None

    def _local(self, service: str, text: str) -> str:
        def address(match: re.Match[str]) -> str:
            host, port = match.groups()
            local = "localhost" if host in SERVICES else "127.0.0.1"
            owner = host if host in SERVICES else service
            return f"{local}:{self.ports[owner, port]}" if port else local

        text = _DEFAULT.sub(r"\1", text).replace("/var/lib/", f"{self.root}/")
        text = _ADDRESS.sub(address, text)
        return _PORT_FLAG.sub(lambda match: str(self.ports[service, match[0]]), text)

    def start(self, service: str) -> None:
        """Start a service, whose output goes to a file. Those of ours are forked."""
        words = self.words(service)
        environment = {**os.environ, **self.environment(service)}
        with (
            (self.root / "logs" / f"{service}.log").open("wb") as log,
            Path(os.devnull).open("rb") as nothing,
        ):
            if words[0].startswith(MODULES):
                streams = (nothing.fileno(), log.fileno(), log.fileno())
                self.processes[service] = Forked(
                    words[1:], environment, streams=streams, module=words[0]
                )
            else:
                self.processes[service] = subprocess.Popen(
                    words, env=environment, stdout=log, stderr=subprocess.STDOUT
                )

    async def command(self, *arguments: str) -> Done:
        """Run a command as `docker compose run --rm operator` does."""
        entry = SERVICES["operator"]["entrypoint"]
        assert entry[1:] == ["-m", COMMAND]
        return await command(*arguments, env=self.environment("operator"))

    def log(self, service: str) -> str:
        """Return what a service has written."""
        return (self.root / "logs" / f"{service}.log").read_text(errors="replace")

    def stop(self) -> None:
        """Stop what runs."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except (subprocess.TimeoutExpired, TimeoutError):
                process.kill()
                process.wait()


@asynccontextmanager
async def running(root: Path) -> AsyncIterator[Compose]:
    """Run all services of the file that are ours, and their servers."""
    composed = Compose(root)
    for name in ("logs", "leasehold", "credentials", "accounts", "webhook", "api"):
        (root / name).mkdir()
    try:
        for name in ONCE:
            if SERVICES[name].get("profiles") is None:
                composed.start(name)
                assert await asyncio.to_thread(composed.processes[name].wait, 60) == 0, (
                    composed.log(name)
                )
        admin = root / "leasehold/cluster/kubeconfig"
        for name, service in SERVICES.items():
            first = str(service.get("command", [""])[0])
            is_ours = first.startswith(MODULES) and name not in ONCE
            if name in {"nats", "redis"} or is_ours:
                composed.start(name)
            if name == "simcluster":
                with contextlib.suppress(TimeoutError):
                    await until(admin.exists)
                assert admin.exists(), composed.log(name)
        yield composed
    finally:
        composed.stop()
