"""One stored object, shown in each of the versions in which its kind is served."""

from services.simcluster.objects import Json
from services.simcluster.resources import Resource


def shown(kind: Resource, obj: Json) -> Json:
    """Return a stored object as a version shows it: the same, under another `apiVersion`."""
    if obj.get("apiVersion") == kind.api_version:
        return obj
    return {**obj, "apiVersion": kind.api_version}
