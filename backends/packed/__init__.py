"""Packed rows: sequences of any length after one another, without padding."""
