"""Reads models' files before anything is built, and checks what was built."""
