"""Tencent: resources and annotations of gpu-manager, and the quotas of gpu-admission."""
