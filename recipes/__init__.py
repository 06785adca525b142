"""Training recipes, installed as `ctxext.recipes`: scripts to read, copy and launch, never to import."""
