"""Roles as processes: where they run, how they start, how they are called, and what happens when one fails."""
