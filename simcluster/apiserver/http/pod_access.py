"""Access to a pod's containers: the choice of the container, and its log."""

from collections.abc import Mapping

from aiohttp import web

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, at_path, metadata
from simcluster.apimachinery.pods import containers_of
from simcluster.apiserver.requests.query_parameters import is_set, non_negative_int
from simcluster.ports import ContainerRuntime, LogOptions

_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

NO_RUNTIME = ApiError(503, "ServiceUnavailable", "this simulated cluster has no kubelets")


def resolve_container(pod: Json, requested: str) -> str:
    """Return the requested or the default container; 400 if it is missing or ambiguous."""
    name = metadata(pod)["name"]
    if not at_path(pod, "spec.nodeName"):
        raise ApiError.bad_request(f"pod {name} does not have a host assigned")
    names = [str(container.get("name")) for container in containers_of(pod)]
    if requested:
        if requested not in names:
            raise ApiError.bad_request(f"container {requested} is not valid for pod {name}")
        return requested
    main = [str(container.get("name")) for container in pod["spec"]["containers"]]
    chosen = (metadata(pod).get("annotations") or {}).get(_DEFAULT_CONTAINER)
    if chosen in names:
        return str(chosen)
    if len(main) > 1:
        raise ApiError.bad_request(
            f"a container name must be specified for pod {name}, choose one of: [{' '.join(main)}]"
        )
    return main[0]


async def serve_log(
    request: web.BaseRequest, runtime: ContainerRuntime | None, pod: Json
) -> web.StreamResponse:
    """Stream a container's log as text."""
    query: Mapping[str, str] = request.query
    container = resolve_container(pod, query.get("container", ""))
    if runtime is None:
        raise NO_RUNTIME
    options = LogOptions(
        follow=is_set(query, "follow"),
        previous=is_set(query, "previous"),
        timestamps=is_set(query, "timestamps"),
        tail_lines=non_negative_int(query, "tailLines"),
        since_s=non_negative_int(query, "sinceSeconds"),
        limit_bytes=non_negative_int(query, "limitBytes"),
    )
    meta = metadata(pod)
    chunks = runtime.log(meta["namespace"], meta["name"], container, options)
    first = await anext(chunks, b"")  # an ApiError must come before the response begins
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    if first:
        await response.write(first)
    async for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response
