"""Evaluation plugins, installed as `ctxext.evals` and found through the entry-point group of that name."""
