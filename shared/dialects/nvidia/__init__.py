"""NVIDIA and HAMi: `nvidia.com/gpu*` resources, HAMi's annotations, policies and metrics."""
