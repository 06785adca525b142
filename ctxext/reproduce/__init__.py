"""Experiments as commands: each runs the library's own steps and leaves a report with pictures."""
