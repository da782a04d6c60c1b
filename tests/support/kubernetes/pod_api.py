"""The fields of a pod in the newest Kubernetes API, recorded from a cluster.

`python -m tests.support.kubernetes.pod_api KUBECONFIG` reads the cluster's `/openapi/v3/api/v1` and
writes the fields of every type that a pod's metadata and spec contain.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import read_kubeconfig

FILE = Path(__file__).parents[2] / "contract" / "pod_api.json"
ROOTS = {
    "metadata": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
    "spec": "io.k8s.api.core.v1.PodSpec",
}
Types = Mapping[str, Mapping[str, str]]
"""The type of each field, by type; empty: it has no fields of its own. `[]` ends names of lists."""


def types_of(openapi: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the types that a pod's metadata and spec contain."""
    schemas = openapi["components"]["schemas"]
    fields: dict[str, dict[str, str]] = {}
    todo = list(ROOTS.values())
    while todo:
        name = todo.pop()
        if _last(name) not in fields:
            fields[_last(name)] = {}
            for field, schema in sorted(schemas[name]["properties"].items()):
                shown, kind = (f"{field}[]", _kind(schema["items"])) if "items" in schema else (
                    field, _kind(schema))  # fmt: skip
                has_fields = "properties" in schemas.get(kind, {})
                fields[_last(name)][shown if has_fields else field] = _last(kind) * has_fields
                todo += [kind] * has_fields
    return fields


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type that a schema names; empty: none. Maps have none."""
    named = [schema, *schema.get("allOf", ())]
    return next(
        (reference["$ref"].rpartition("/")[2] for reference in named if "$ref" in reference), ""
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def recorded() -> Types:
    """Return the types as recorded."""
    types: Types = json.loads(FILE.read_text())
    return types


def paths(types: Types) -> Iterator[str]:
    """Yield the path of every field without fields of its own, as `pod_fields` writes them."""
    for part, kind in ROOTS.items():
        yield from _paths_below(part, _last(kind), types)


def _paths_below(path: str, kind: str, types: Types) -> Iterator[str]:
    for name, below in types[kind].items():
        if below:
            yield from _paths_below(f"{path}.{name}", below, types)
        else:
            yield f"{path}.{name}"


async def _read(kubeconfig: Path) -> Mapping[str, Any]:
    async with KubernetesClient(read_kubeconfig(kubeconfig)) as client:
        openapi: Mapping[str, Any] = json.loads(await client.read("/openapi/v3/api/v1"))
        return openapi


if __name__ == "__main__":
    lists = types_of(asyncio.run(_read(Path(sys.argv[1]))))
    FILE.write_text(json.dumps(lists, indent=1, sort_keys=True) + "\n")
