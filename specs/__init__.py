"""The definition of a run: the schema of the spec, the batch, the wire messages, the errors. No torch here."""
