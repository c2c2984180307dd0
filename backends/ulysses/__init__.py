"""Sequence parallelism after Ulysses (Jacobs et al. 2023): ranks share a row, attention alone sees all of it."""
