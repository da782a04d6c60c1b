"""A simulated cluster: a Kubernetes API server and kubelets, for a machine without a cluster."""
