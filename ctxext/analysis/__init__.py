"""What a model reads and where it breaks: receptive field, attention scores and their bounds, loss by position."""
