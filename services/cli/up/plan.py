"""The plan of `up`: GPU layouts of nodes, ports and programs of servers."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from services.cli.arguments import MAX_PORT
from services.cli.local_commands import Up
from services.cli.state_dir import LOCAL, State, optional_path
from services.cli.up import servers
from shared.model.errors import RequestError

DEFAULT_NODES = 2
DEFAULT_LAYOUT = "4xT4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A server whose program is empty runs elsewhere, at its URL."""

    settings: Up
    nodes: Mapping[str, str]
    """GPU layouts."""
    ports: Mapping[str, int]
    """Of `nats`, `redis`, `api`, `page`, `extender`; of nodes' usage metrics, `usage-<node>`."""
    nats_program: str
    redis_program: str
    nats_url: str
    redis_url: str
    python: tuple[str, ...] = (sys.executable, "-P", "-m")
    """Runs a Python module whose name is appended."""

    def usage_address(self, node: str) -> str:
        return f"{servers.HOST}:{self.ports[usage_port(node)]}"

    @property
    def local(self) -> bool:
        return LOCAL in self.nodes.values()

    @property
    def extender_address(self) -> str:
        return f"{servers.HOST}:{self.ports['extender']}"

    @property
    def page_url(self) -> str:
        return f"http://{servers.HOST}:{self.ports['page']}"


AGGREGATED = "aggregated"


def usage_port(node: str) -> str:
    return f"usage-{node}"


def plan_of(settings: Up, nodes: Mapping[str, str], before: State | None) -> Plan:
    servers.check_loopback()
    requested = {
        "nats": settings.nats_port,
        "redis": settings.redis_port,
        "api": settings.api_port,
        "page": settings.page_port,
        AGGREGATED: 0,
        "extender": 0,
    }
    for number, node in enumerate(nodes):
        requested[usage_port(node)] = settings.usage_port and settings.usage_port + number
    given = [port for port in requested.values() if port]
    ports: dict[str, int] = {}
    for name, port in requested.items():
        if port and (port > MAX_PORT or given.count(port) > 1 or not servers.is_free(port)):
            flag = name.partition("-")[0]
            raise RequestError(
                f"--{flag}-port: port {port} is in use, requested twice or above {MAX_PORT}: "
                "choose a free port, or omit the flag"
            )
        last = before.ports.get(name, 0) if before else 0
        ports[name] = port or servers.choose_port(last, taken=(*given, *ports.values()))
    return Plan(
        settings=settings,
        nodes=nodes,
        ports=ports,
        nats_program="" if settings.nats_url else servers.nats_program(),
        redis_program="" if settings.redis_url else servers.valkey_program(),
        nats_url=settings.nats_url or f"nats://{servers.HOST}:{ports['nats']}",
        redis_url=settings.redis_url or f"redis://{servers.HOST}:{ports['redis']}/0",
    )


def with_library(settings: Up, nodes: Mapping[str, str], before: State | None) -> Up:
    if settings.fresh or settings.library_source or before is None or before.nodes != nodes:
        return settings
    return replace(settings, library_source=optional_path(before.library_source))


def layouts_of(
    gpus: str,
    nodes: int | None,
    *,
    before: Mapping[str, str],
    check: Callable[[str], object],
) -> dict[str, str]:
    """One layout is for every node; several are for one node each.

    Values that the flags omit are those of `before`. Raises RequestError.
    """
    layouts = _layouts(gpus, nodes, list(before.values()))
    if LOCAL in layouts:
        if len(layouts) > 1 or nodes not in {None, 1}:
            raise RequestError("--gpus local is one node, this machine: omit --nodes")
        nodes = 1
    if nodes is None:
        nodes = len(layouts) if len(layouts) > 1 else len(before) or DEFAULT_NODES
    if nodes < 1:
        raise RequestError(f"--nodes must be at least 1, got {nodes}: at least one node is needed")
    if len(layouts) == 1:
        layouts *= nodes
    if len(layouts) != nodes:
        raise RequestError(
            f"--gpus has {len(layouts)} layouts for {nodes} nodes: set one for all nodes, or "
            f"{nodes} with commas between, such as --gpus {','.join(['4xT4'] * min(nodes, 3))}"
        )
    for layout in dict.fromkeys(layouts):
        check(layout)
    return {f"node-{number}": layout for number, layout in enumerate(layouts)}


def _layouts(gpus: str, nodes: int | None, before: list[str]) -> list[str]:
    layouts = [layout.strip() for layout in gpus.split(",") if layout.strip()]
    if layouts:
        return layouts
    layouts = before or [DEFAULT_LAYOUT]
    return layouts if nodes is None or nodes == len(layouts) else [layouts[0]]
