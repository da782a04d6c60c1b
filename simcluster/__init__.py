"""A Kubernetes API subset, kubelets and GPUs for a machine that has none of them."""
