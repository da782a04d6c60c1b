"""Each route of each HTTP port: its caller is known before its handler runs, or its bound is here.

`OPEN` is a decision: what a route does for anyone, and what limits that. Nothing in it may lease,
charge, evict or refuse somebody else. `shared/runtime/listener.py` bounds connections and bodies of
all of them.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest
from aiohttp import web

from services.api.aggregated.server import AggregatedApi
from services.api.http.http_server import HttpServer
from services.extender import server as extender_server
from services.timekeeper.rest_api import BudgetApi
from services.webhook import server as webhook_server
from services.webhook.registration import webhook_paths
from shared.credentials.authorization import TokenAuthenticator
from shared.runtime import health
from shared.runtime.connections import PortBounds
from shared.runtime.listener import BOUNDS

ROOT = Path(__file__).parents[2]
SHOWS_STATE = "reads what is in memory"
REVIEW = "decides about its own answer alone; reviews take turns by size and namespace"
OPEN: Mapping[str, Mapping[str, str]] = {
    "every service": {
        "GET /healthz": SHOWS_STATE,
        "GET /readyz": SHOWS_STATE,
        "GET /metrics": "rendered once a second for all who ask",
    },
    "metrics of vendors": {"GET /metrics": "rendered once a second for all who ask"},
    "webhook, callers unknown": {f"POST {path}": REVIEW for path in webhook_paths().values()},
    "webhook, callers known": {},
    "extender": {},
    "timekeeper": {
        "POST /budget/{namespace}/report": "20 reads of pods at the API server in a second",
    },
    "timekeeper, for old sidecars": {
        "POST /budget/{namespace}/report": "20 reads of pods at the API server in a second",
    },
    "api": {
        "GET /": "sends to the form, or shows what the token may see",
        "GET /static/{name}": "files in memory",
        "GET /login": "a form",
        "POST /login": "40 reviews of unknown tokens in a second, none of them twice in 30 s",
        "POST /logout": "removes a cookie of its caller",
    },
    "aggregated api": {},
}
DENIED = {401, 403}


def services() -> dict[str, web.Application]:
    """The application of each port, with nothing behind it."""
    known = TokenAuthenticator(((b"of-somebody", "*"),))
    budgets = BudgetApi(Mock(), known, client=AsyncMock(), old_reports="answer")
    pages = HttpServer(Mock(), known)
    reviews = {
        knows: webhook_server.application(
            Mock(knows_callers=knows, review=AsyncMock(return_value=b"{}")),
            webhook_server.Drain(),
            webhook_paths().values,
        )
        for knows in (False, True)
    }
    return {
        "every service": health.application({}),
        "metrics of vendors": health.metrics_application(),
        "webhook, callers unknown": reviews[False],
        "webhook, callers known": reviews[True],
        "extender": extender_server.application(Mock(), "kube-scheduler"),
        "timekeeper": budgets.application(),
        "timekeeper, for old sidecars": budgets.reports(),
        "api": pages.application(),
        "aggregated api": AggregatedApi(pages, Mock()).application(),
    }


def routes(pages: web.Application) -> list[tuple[str, str]]:
    found = (
        (route.method, route.resource.canonical)
        for route in pages.router.routes()
        if route.resource is not None and route.method != "HEAD"
    )
    return sorted(found)


@pytest.mark.parametrize("port", list(OPEN))
async def test_a_route_that_is_not_listed_as_open_denies_callers_that_are_not_known(
    port: str,
) -> None:
    pages = services()[port]
    denied: set[str] = set()
    served: set[str] = set()

    async with health.served(pages, "127.0.0.1:0") as address, aiohttp.ClientSession() as http:
        for method, path in routes(pages):
            url = f"http://{address}" + re.sub(r"{[^}]+}", "a", path)
            body: Mapping[str, str] | None = {} if method == "POST" else None
            async with http.request(method, url, allow_redirects=False, json=body) as response:
                outcome = denied if response.status in DENIED else served
                outcome.add(f"{method} {path}")

    assert served | (denied & OPEN[port].keys()) == set(OPEN[port])


def calls(*names: str) -> Iterator[str]:
    """Yield the file of each call of one of these attributes of `web`."""
    for folder in ("services", "shared"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not any(name in text for name in names):
                continue  # to parse all files takes seconds
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                    f"web.{name}" for name in names
                }:
                    yield str(path.relative_to(ROOT))


def test_the_ports_are_all_that_services_serve() -> None:
    """A new application needs an entry here."""
    making = set(calls("Application"))

    assert services().keys() == OPEN.keys()
    assert making == {
        "services/api/aggregated/server.py",
        "services/api/http/http_server.py",
        "services/extender/server.py",
        "services/timekeeper/rest_api.py",
        "services/webhook/server.py",
        "shared/runtime/health.py",
    }


def test_all_applications_are_served_by_the_bounded_listener() -> None:
    runners = calls("AppRunner", "ServerRunner", "TCPSite", "UnixSite", "run_app")

    assert list(runners) == ["shared/runtime/listener.py"]


def test_bounds_that_are_read_before_a_caller_is_known_are_low() -> None:
    """Memory for bodies of all connections of a port, and of those with a turn."""
    bounds = {port: pages.get(BOUNDS, PortBounds()) for port, pages in services().items()}
    most_mib = {port: memory_mib(of_port) for port, of_port in bounds.items()}

    assert most_mib["webhook, callers unknown"] <= 256
    assert max(most_mib[port] for port in most_mib if port.partition(",")[0] != "webhook") <= 128


def memory_mib(bounds: PortBounds) -> float:
    of_all = bounds.connections * bounds.free_body_bytes
    return (of_all + bounds.larger_bodies * bounds.body_bytes) / 1024**2
