"""A CUDA device without a GPU, for tests: tensors say `cuda:0`, their memory is the host's, and who waits for whom is
followed. `docs/gpu.md` has what that shows and what only a GPU can."""
