"""Weights on disk: Hugging Face directories, policy checkpoints and training checkpoints (both Orbax)."""
