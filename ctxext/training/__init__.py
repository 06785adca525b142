"""Fine-tuning: what a recipe is made of."""
