"""megafx: a plain eager PyTorch transformer becomes a fused, tensor-parallel one."""
