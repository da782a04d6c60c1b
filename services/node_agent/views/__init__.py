"""What Kubernetes objects show of the node: status, annotations, labels, custom objects."""
