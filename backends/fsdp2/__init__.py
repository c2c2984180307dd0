"""Fully sharded data parallel training with PyTorch's `fully_shard`."""
