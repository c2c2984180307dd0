"""An export on its way to others: its model card, and the Hugging Face hub."""
