"""Hugging Face models: building them, and reading back what was built."""
