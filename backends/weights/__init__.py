"""A model's weights as bytes: checksums, files, process groups and device memory."""
