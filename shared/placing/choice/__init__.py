"""The choice of devices on one node for a pod, or the reasons why they do not fit."""
