"""Export of a checkpoint as a Hugging Face folder."""
