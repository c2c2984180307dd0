"""What a model's files say, before anything is built."""
