"""Rules that span several keys of a spec."""
