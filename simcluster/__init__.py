"""A simulated cluster: API server, controllers, scheduler and kubelets, for a laptop."""
