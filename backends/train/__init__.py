"""Code that the train engines for Hugging Face models share."""
