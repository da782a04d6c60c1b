"""Runs the watcher: `python -m services.watcher --help`."""

from services.watcher.settings import WatcherSettings
from services.watcher.wiring import serve_watcher
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(
        WatcherSettings,
        "python -m services.watcher",
        about="Publish the API server's pods and nodes as events. Any number of replicas may run.",
        examples=(
            "python -m services.watcher --kubeconfig .leasehold/accounts/watcher "
            "--nats-url nats://nats:4222",
            "python -m services.watcher --schedulers volcano --volcano-conf volcano-scheduler.conf",
        ),
    )
    run(lambda: serve_watcher(settings), service="watcher", log_level=settings.log_level)


if __name__ == "__main__":
    main()
