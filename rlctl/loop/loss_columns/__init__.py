"""Columns that the driver makes for the policy loss, and no model."""
