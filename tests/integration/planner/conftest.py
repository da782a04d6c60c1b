"""What tests of several files start: a node with pods, a planner and binders."""

from tests.support.planner.scene import at

__all__ = ["at"]
