"""Read what grading says of the samples: terms that come late, completions that were not graded."""
