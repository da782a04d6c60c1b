"""The extender: kube-scheduler asks it which nodes fit a pod, and has it bind the pod."""
