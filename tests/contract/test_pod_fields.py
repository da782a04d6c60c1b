"""Every field of a pod in the Kubernetes API has a row in the table of what the placer obeys."""

from shared.placing.pod_fields import FIELDS, Effect, PodField
from tests.support.kubernetes.pod_api import paths, recorded, types_of

RECORD = "python -m tests.support.kubernetes.pod_api KUBECONFIG"
API = tuple(paths(recorded()))
ROWS: dict[str, list[PodField]] = {}
for _row in FIELDS:
    ROWS.setdefault(_row.path.removesuffix("[]"), []).append(_row)


def covering(path: str) -> str | None:
    """Return the path of the row for a field: its own, or the nearest above."""
    while path and path not in ROWS:
        path = path.rpartition(".")[0].removesuffix("[]")
    return path or None


def test_every_field_has_one_row_and_every_row_is_of_a_field() -> None:
    new = [path for path in API if covering(path) is None]
    assert new == [], "decide in shared/placing/pod_fields.py"
    assert set(ROWS) == {covering(path) for path in API}
    for rows in ROWS.values():
        assert sum(not row.when for row in rows) <= 1


def test_what_is_obeyed_is_a_field_without_fields_of_its_own() -> None:
    obeyed = {row.path for row in FIELDS if row.effect is Effect.OBEYED}

    assert obeyed <= set(API), "a field below it that is new would count as obeyed"


def test_a_new_field_of_the_api_is_found_at_any_depth() -> None:
    reference = {"$ref": "#/components/schemas/io.k8s.api.core.v1.Toleration"}
    wrapped = {"allOf": [reference], "default": {}}
    openapi = {
        "components": {
            "schemas": {
                "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta": {"properties": {}},
                "io.k8s.api.core.v1.PodSpec": {
                    "properties": {"tolerations": {"items": wrapped}, "new": reference}
                },
                "io.k8s.api.core.v1.Toleration": {"properties": {"percent": {"type": "integer"}}},
            }
        }
    }

    found = list(paths(types_of(openapi)))

    assert found == ["spec.new.percent", "spec.tolerations[].percent"]
    assert [covering(path) for path in found] == [None, None], RECORD
