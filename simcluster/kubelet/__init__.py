"""The simulated kubelets: nodes, pods, devices and containers."""
