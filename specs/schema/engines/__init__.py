"""The engines: a table for each, and what is known of it without running it."""
