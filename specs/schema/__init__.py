"""The run spec as frozen pydantic models."""
