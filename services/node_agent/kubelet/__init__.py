"""The kubelet: device-plugin gRPC, PodResources, pod list, cgroups of pods."""
