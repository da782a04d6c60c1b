"""What Kubernetes objects show of the node: status, annotations, custom objects."""
