"""Kubernetes objects, resources, selectors and errors, for the API server and the kubelets."""
