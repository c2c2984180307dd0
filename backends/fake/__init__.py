"""Fake engines: a bigram language model in numpy that learns and samples for real, without torch."""
