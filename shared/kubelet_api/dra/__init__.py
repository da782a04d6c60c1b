"""The kubelet's interface to drivers of dynamic resource allocation, v1."""
