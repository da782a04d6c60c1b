"""The kubelet's gRPC interfaces and the code generated from them."""
