"""The evaluation protocol, the runner that drives any evaluation, and what is made of the results."""
