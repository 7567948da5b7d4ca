"""Sampling completions from a policy: slots, key-value cache, sampler, schedule."""
