"""NVIDIA and HAMi: `nvidia.com/gpu*` resources and annotations."""
