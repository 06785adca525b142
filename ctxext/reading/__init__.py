"""Random-access reading (arXiv 2405.13216): a model skips what it can predict, and reads on behind it."""
