"""Seeds that follow from names: the same on every host, in every Python, whatever the order of things."""

import hashlib


def stable_seed(*parts: int | str) -> int:
    """31 bits of a hash of the parts, e.g. of (run seed, step, problem id)."""
    text = "\n".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
