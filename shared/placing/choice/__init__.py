"""The choice of devices on one node for a pod."""
