"""Reports of costs."""
