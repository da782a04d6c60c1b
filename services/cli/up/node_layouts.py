"""Which GPUs each simulated node has: `--gpus` and `--nodes` read together."""

from collections.abc import Callable, Mapping

from shared.model.errors import RequestError

DEFAULT_NODES = 2
DEFAULT_LAYOUT = "4xT4"


def layouts_of(
    gpus: str,
    nodes: int | None,
    *,
    before: Mapping[str, str],
    check: Callable[[str], object],
) -> dict[str, str]:
    """Return the layout of each node by the node's name.

    One layout is every node's; several are one each. What is not given is as it was `before`.
    Raises RequestError if the two do not fit together or `check` refuses a layout.
    """
    layouts = [part.strip() for part in gpus.split(",") if part.strip()]
    if not layouts:
        layouts = list(before.values()) or [DEFAULT_LAYOUT]
        layouts = layouts if nodes is None or nodes == len(layouts) else [layouts[0]]
    if nodes is None:
        nodes = len(layouts) if len(layouts) > 1 else len(before) or DEFAULT_NODES
    if nodes < 1:
        raise RequestError(f"--nodes {nodes}: at least one node is needed")
    if len(layouts) == 1:
        layouts *= nodes
    if len(layouts) != nodes:
        raise RequestError(
            f"--gpus names {len(layouts)} layouts for {nodes} nodes: give one for all of them, or "
            f"{nodes} with commas between, such as --gpus {','.join(['4xT4'] * min(nodes, 3))}"
        )
    for layout in dict.fromkeys(layouts):
        check(layout)
    return {f"node-{number}": layout for number, layout in enumerate(layouts)}
