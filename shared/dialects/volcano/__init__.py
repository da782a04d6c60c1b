"""Volcano: `volcano.sh/gpu-*` and `volcano.sh/vgpu-*` resources, annotations, configuration."""
