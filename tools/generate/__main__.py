"""Write all generated files: `python -m tools.generate`. Review the difference before a commit."""

from collections.abc import Mapping
from pathlib import Path

from tools.generate import (
    compatibility,
    custom_kinds,
    grafana,
    kube_scheduler,
    manifests,
    network_policies,
    openapi,
    pages,
    reference,
    variables,
)


def write(files: Mapping[Path, str]) -> None:
    """Write what differs, and print its path."""
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path)


def main() -> None:
    """Write pages and manifests."""
    write(manifests.webhook_manifests())
    write({manifests.ALERTS: manifests.alerts()})
    write(grafana.dashboards())
    write(custom_kinds.definitions())
    write({manifests.KUBE_SCHEDULER: kube_scheduler.manifest()})
    write({manifests.BASE / "network-policies.yaml": network_policies.manifest()})
    write(
        {
            pages.ARCHITECTURE: pages.architecture(),
            compatibility.CHECKLISTS: compatibility.checklists(),
            openapi.PAGE: openapi.generated(),
            reference.PAGE: reference.generated(),
            variables.MODULE: variables.generated(),
        }
    )


if __name__ == "__main__":
    main()
