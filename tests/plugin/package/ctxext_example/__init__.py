"""An example of a plugin package for ctxext: one position method and one evaluation."""
