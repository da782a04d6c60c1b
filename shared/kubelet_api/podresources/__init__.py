"""The kubelet's PodResources API, v1."""
