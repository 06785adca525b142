"""Read, write, patch, inspect and diagnose checkpoint folders; weights are never read unless they must be."""
