"""The watcher: publishes the API server's pods, nodes and quotas as events."""
