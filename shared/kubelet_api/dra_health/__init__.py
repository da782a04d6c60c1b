"""The kubelet's interface to the health of devices in ResourceClaims, v1alpha1."""
