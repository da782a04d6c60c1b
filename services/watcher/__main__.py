"""Runs the watcher: `python -m services.watcher --help`."""

from services.watcher.settings import WatcherSettings
from services.watcher.wiring import serve_watcher
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(
        WatcherSettings,
        serve_watcher,
        service="watcher",
        about="Publish the API server's pods and nodes as events. Any number of replicas may run.",
        examples=(
            "python -m services.watcher --kubeconfig .leasehold/accounts/watcher "
            "--nats-url nats://nats:4222",
            "python -m services.watcher --schedulers volcano --volcano-conf volcano-scheduler.conf",
        ),
    )
