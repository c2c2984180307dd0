"""Publish an export: its model card, and the Hugging Face hub."""
