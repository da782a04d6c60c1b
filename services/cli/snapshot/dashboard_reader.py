"""Reads a cluster through the dashboard's API, with the permissions of the kubeconfig's user."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import msgspec

from services.cli.program import program
from services.cli.snapshot.cluster_objects import ClusterObjects
from services.cli.snapshot.location import ClusterLocation
from services.cli.snapshot.snapshot import MeasuredUsage, PodSummary, Snapshot
from shared.credentials.tokens import VIEWER_COOKIE
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import ForbiddenError, NotFoundError, OverloadedError
from shared.kubernetes.kubeconfig import (
    NO_KUBECONFIG,
    ClusterCredentials,
    KubeconfigError,
    load_credentials,
)
from shared.kubernetes.token_requests import request_token
from shared.model.cluster_view import ClusterView
from shared.model.errors import RequestError, UnavailableError
from shared.model.ledger import NodeTotals
from shared.model.usage import IDLE_AFTER_S

T = TypeVar("T")
VIEWER = "viewer"
"""The service account whose tokens users without a token use, if they may create them."""
TOKEN_S = 3600


class DashboardReader:
    """The dashboard at a URL, or as a Service behind the proxy of the API server."""

    def __init__(
        self, location: ClusterLocation, kubernetes: KubernetesClient, *, idle_after_s: float
    ) -> None:
        self.location = location
        self.kubernetes = kubernetes
        self.idle_after_s = idle_after_s
        self._view = ClusterView(read_at=0.0)
        self._token = ""

    async def nodes(self) -> tuple[NodeTotals, ...]:
        """Return every node; leases of namespaces that the user may not see have no names."""
        self._view = await self.get("/api/v1/cluster", ClusterView)
        return self._view.nodes

    async def read_usage(self, _: Iterable[NodeTotals]) -> MeasuredUsage:
        """Return the usage that was measured when the nodes were read last."""
        return MeasuredUsage(
            shares={one.key: one for one in self._view.usage},
            unmeasured_nodes=self._view.unmeasured_nodes,
            missing_components=self._view.problems,
            read_at=self._view.read_at,
            idle_after_s=self.idle_after_s,
        )

    async def pod(self, namespace: str, name: str) -> PodSummary | None:
        """Return one pod of the API server, or None."""
        return await ClusterObjects(self.kubernetes).pod(namespace, name)

    async def snapshot(self, *, now: float, pods: bool = True) -> Snapshot:
        """Read everything that is visible; `now` is replaced by the dashboard's time."""
        nodes = await self.nodes()
        view = self._view
        namespaces = sorted({lease.namespace for each in nodes for lease in each.leases} - {""})
        objects = ClusterObjects(self.kubernetes)
        found = [pod for name in namespaces if pods for pod in await objects.pods(name)]
        return Snapshot(
            read_at=view.read_at or now,
            nodes=nodes,
            waiting=view.waiting,
            queue=view.queue,
            pods=tuple(found),
            fair_share=view.fair_share,
        )

    async def with_usage(self, snapshot: Snapshot) -> Snapshot:
        """Add the usage that was measured when the snapshot was read."""
        return replace(snapshot, usage=await self.read_usage(snapshot.nodes))

    async def get(self, path: str, kind: type[T]) -> T:
        """Return a response of the dashboard.

        Raises RequestError or UnavailableError, with what to do.
        """
        try:
            body = await self._read(path)
        except NotFoundError as error:
            raise UnavailableError(
                f"this cluster has no Service {self.location.dashboard} with Leasehold's dashboard "
                f"of this version: install it, or set --dashboard to its NAMESPACE/NAME or its URL "
                f"({error})"
            ) from error
        except ForbiddenError as error:
            raise RequestError(
                "your account may not read the dashboard through the API server: an administrator "
                "can bind the Role dashboard-reader to it, or set --dashboard to the dashboard's "
                f"URL ({error.response})"
            ) from error
        except OverloadedError as error:
            raise UnavailableError(
                f"no replica of the dashboard is ready: `kubectl get pods -n "
                f"{self.location.service_namespace}` shows them ({error.response})"
            ) from error
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(
                f"the response of {self.location.dashboard} is not what this version of the "
                f"command reads: use the command of the cluster's version ({error})"
            ) from error

    async def _read(self, path: str) -> bytes:
        dashboard = self.location.dashboard
        token = await self.kubernetes.bearer_token() or await self._viewer_token()
        if "://" not in dashboard:
            cookie = f"{VIEWER_COOKIE}={token}"
            return await self.kubernetes.read_service(dashboard, path, cookie=cookie)
        at_url = ClusterCredentials(server=dashboard.rstrip("/"), token=token)
        async with KubernetesClient(at_url) as client:
            return await client.read(path)

    async def _viewer_token(self) -> str:
        """Return a token of the account `viewer`, for users with a client certificate."""
        if not self._token:
            namespace = self.location.service_namespace
            spec = {"expirationSeconds": TOKEN_S}
            try:
                issued = await request_token(self.kubernetes, namespace, VIEWER, spec)
            except (NotFoundError, ForbiddenError) as error:
                raise RequestError(
                    "your kubeconfig has no token, by which the dashboard recognises you: use a "
                    f"context with one, or have the right to create tokens of {namespace}/{VIEWER} "
                    f"({error.response})"
                ) from error
            self._token = issued.token
        return self._token


@asynccontextmanager
async def open_dashboard_reader(
    location: ClusterLocation, *, idle_after_s: float = IDLE_AFTER_S
) -> AsyncIterator[DashboardReader]:
    """Open the API server of the kubeconfig. Raises UnavailableError if there is none."""
    try:
        credentials = load_credentials(location.kubeconfig, context=location.context)
    except KubeconfigError as error:
        if error.where != NO_KUBECONFIG:
            raise
        raise UnavailableError(
            f"there is nothing to read: run `{program()} up` for a simulated cluster, or name a "
            f"cluster with --kubeconfig or KUBECONFIG ({location.absent}; {error.what})"
        ) from error
    async with KubernetesClient(credentials) as kubernetes:
        yield DashboardReader(location, kubernetes, idle_after_s=idle_after_s)
