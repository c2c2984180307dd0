"""The embedded sampler: continuous batching over a preallocated key-value cache."""
