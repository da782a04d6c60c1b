"""The node agent: reports a node's GPUs, serves its kubelet, prepares isolation."""
