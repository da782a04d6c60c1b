"""A stack of three nodes like that of `three_nodes`, so that both folders are tested at once."""

from tests.e2e.three_nodes.conftest import whole

__all__ = ["whole"]
