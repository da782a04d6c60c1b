"""The planner: which pods are evicted, or wait, so that others can start."""
