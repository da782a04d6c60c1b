"""The simulated kubelet: pods, containers, devices, PodResources and node status."""
