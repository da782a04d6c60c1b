"""The kubelet's device manager: plugins, allocations, checkpoint, PodResources."""
