"""Other kernels than the model's own modules for what they compute: norms, gated MLPs, rotary positions."""
