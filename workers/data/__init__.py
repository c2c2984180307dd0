"""Reading a data source and drawing prompts from it."""
