"""The tables of rights in docs/security.md are those of the manifests."""

from tools.generate import security


def test_the_tables_of_rights_are_those_of_the_manifests() -> None:
    assert security.generated() == security.PAGE.read_text(), "python -m tools.generate"


def test_no_container_is_privileged_and_capabilities_are_few() -> None:
    able = {name: security.capabilities(container) for name, container, _ in security.containers()}

    assert {name: found for name, found in able.items() if found != "none"} == {
        "node-agent": "DAC_OVERRIDE",
        "partitioner": "SYS_ADMIN",
    }
