"""A simulated API server with two kinds that definitions add, over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.definitions import DEVICES, POD_GROUPS

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
DEVICE_LIST = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
MERGE = {"Content-Type": "application/merge-patch+json"}
APPLY = {"Content-Type": "application/apply-patch+yaml"}
TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}


@asynccontextmanager
async def custom_kinds() -> AsyncIterator[ApiUnderTest]:
    """Start the server."""
    async with api_server() as started:
        started.store.create("customresourcedefinitions", POD_GROUPS)
        started.store.create("customresourcedefinitions", DEVICES)
        yield started
