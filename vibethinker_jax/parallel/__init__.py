"""Device mesh and the rules that place every array on it."""
