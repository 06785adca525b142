"""Publishing: the model card of a checkpoint, and the push to the Hub."""
