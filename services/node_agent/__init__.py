"""The node agent: reports a node's GPUs, answers its kubelet, prepares isolation."""
