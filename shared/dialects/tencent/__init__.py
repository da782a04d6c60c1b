"""gpu-manager: `tencent.com/vcuda-*` resources and annotations."""
