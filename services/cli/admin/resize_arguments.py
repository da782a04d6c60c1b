"""The command line of `leasehold resize`; what it does is imported when it is called."""

import argparse
from collections.abc import Callable

from services.cli import flags

ABOUT = """\
The container goes on running. More memory is there for its next allocation; less is possible down
to what it has in use. Of several GPUs each gets the new size. Cores hold for processes that start
from then on: those that run keep their cap. MIG instances and whole devices keep their size.
Asking again for the same size changes nothing."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    resize = command(
        "resize",
        "change how much of its GPU a running container has",
        _resize,
        "my-pod --memory 6Gi",
        "my-pod -n team-a -c trainer --memory 12Gi --cores 40",
        "my-pod --cores 20 --json",
    )
    resize.description = f"{resize.description}\n\n{ABOUT}"
    option = resize.add_argument
    flags.of_pod(resize)
    option(
        "-c",
        "--container",
        default="",
        metavar="NAME",
        help="needed where several containers have shares",
    )
    option("--memory", default="", metavar="SIZE", help="of each of its GPUs: 6Gi, 6144Mi")
    option("--cores", type=int, metavar="PERCENT", help="of each of its GPUs: 1 to 99")
    flags.of_state(resize)
    flags.of_server(
        resize,
        "nats",
        url="where a binder is asked",
        credentials="user:secret of the operator",
        files={
            "token": "a token of the operator's service account, instead",
            "ca": "authority of NATS' certificate, PEM",
        },
    )
    flags.of_api_server(resize)
    flags.for_programs(resize)


def _resize(given: argparse.Namespace) -> int:
    from services.cli.admin.resize import resize

    return resize(given)
