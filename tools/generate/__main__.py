"""Write all generated files: `python -m tools.generate`. Review the difference before a commit."""

from pathlib import Path

from tools.generate import (
    compatibility,
    custom_kinds,
    grafana,
    kube_scheduler,
    limits,
    lua_constants,
    lua_layouts,
    manifests,
    network_policies,
    openapi,
    pages,
    reference,
    rights,
    timings,
)


def generated() -> dict[Path, str]:
    """Return the content of every generated file."""
    return {
        **manifests.webhook_manifests(),
        **grafana.dashboards(),
        **custom_kinds.definitions(),
        manifests.RULES: manifests.rules(),
        manifests.DASHBOARDS: manifests.dashboards(),
        manifests.KUBE_SCHEDULER: kube_scheduler.manifest(),
        manifests.BASE / "network-policies.yaml": network_policies.manifest(),
        pages.ARCHITECTURE: pages.architecture(),
        pages.TROUBLESHOOTING: pages.troubleshooting(),
        compatibility.CHECKLISTS: compatibility.checklists(),
        limits.PAGE: limits.generated(),
        lua_constants.MODULE: lua_constants.generated(),
        lua_layouts.MODULE: lua_layouts.generated(),
        openapi.PAGE: openapi.generated(),
        reference.PAGE: reference.generated(),
        rights.FILE: rights.rights(),
        timings.PAGE: timings.generated(),
    }


def main() -> None:
    """Write what differs, and print its path."""
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path)


if __name__ == "__main__":
    main()
