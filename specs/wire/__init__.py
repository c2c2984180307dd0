"""What travels between driver and ranks."""
