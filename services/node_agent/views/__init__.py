"""The node in Kubernetes objects: status, annotations, labels, custom objects."""
