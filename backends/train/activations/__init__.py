"""What a forward pass keeps for the backward pass, and where."""
