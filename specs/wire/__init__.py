"""Messages between driver and ranks."""
