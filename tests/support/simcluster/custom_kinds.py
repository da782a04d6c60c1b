"""A simulated API server with two kinds that definitions add, over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import yaml

from services.cli.up.installation import KINDS
from simcluster.apimachinery.objects import Json, JsonValue
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


def older_definition(kinds: str) -> Json:
    """The definition of a kind of ours, from before its fields had patterns and rules."""

    def lenient(schema: JsonValue) -> JsonValue:
        if not isinstance(schema, dict):
            return schema
        strict = {"x-kubernetes-validations", "pattern"}
        return {key: lenient(item) for key, item in schema.items() if key not in strict}

    definition: Json = yaml.safe_load(KINDS.joinpath(f"{kinds}.yaml").read_text())
    for version in definition["spec"]["versions"]:
        version["schema"] = lenient(version["schema"])
    return definition
