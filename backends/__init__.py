"""Engines that hold and run models: their protocol, and one file or folder per engine."""
