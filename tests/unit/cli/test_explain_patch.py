"""`explain -o json` of a waiting pod has the changes that its hint names as a patch of the pod."""

import msgspec
from msgspec import structs

from services.cli.inspect.explanation import explanation_of
from shared.model.change import Change, Place
from shared.model.views.pods import TraceView
from tests.support.snapshots import OURS, POD, WAITING, cluster_of


def test_explain_has_the_patch_of_the_changes_that_the_hint_names() -> None:
    view = cluster_of(waiting=[WAITING]).pod(POD.pod, TraceView(trace=""))
    assert view is not None
    assert view.waiting is not None
    memory = Change(Place.RESOURCE, "volcano.sh/vgpu-memory", "2768", "main")
    changed = structs.replace(view, waiting=structs.replace(view.waiting, changes=(memory,)))
    manifest = {"spec": {"containers": [{"name": "sidecar"}, {"name": "main", "resources": {}}]}}

    explained_pod = explanation_of(POD, changed, OURS, manifest=manifest)

    assert list(msgspec.to_builtins(explained_pod.patch)) == [
        {"op": "add", "path": "/spec/containers/1/resources/limits", "value": {}},
        {
            "op": "add",
            "path": "/spec/containers/1/resources/limits/volcano.sh~1vgpu-memory",
            "value": "2768",
        },
    ]
    assert explanation_of(POD, view, OURS, manifest=manifest).patch == ()
