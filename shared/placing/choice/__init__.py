"""The choice of devices on one node for a pod, or why they do not fit."""
