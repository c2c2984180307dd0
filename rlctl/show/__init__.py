"""Show a person what happens: progress, charts, the report."""
