"""The code of the kubelet's gRPC interfaces, generated from the files in `proto`."""
