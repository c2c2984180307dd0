"""What a person sees: progress, charts, the report."""
