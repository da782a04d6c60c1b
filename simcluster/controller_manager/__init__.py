"""The controller manager: Deployments, ReplicaSets, StatefulSets, DaemonSets and Jobs."""
