"""Published peaks of TPU chips, per chip."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Peaks of one chip; what a program reaches is below all of them.

    Attributes:
        bf16_flops: matrix products per second.
        hbm_bandwidth: bytes per second.
        host_bandwidth: bytes per second to and from host memory.
        link_bandwidth: bytes per second and direction of one link to a neighbour.
    """

    bf16_flops: float
    hbm_bandwidth: float
    host_bandwidth: float
    link_bandwidth: float


# Google Cloud TPU documentation, system architecture pages of v5e, v5p and v6e (bf16 peak, HBM bandwidth, interchip
# interconnect); per link and direction, and PCIe: "How to Scale Your Model", chapter 2
# (jax-ml.github.io/scaling-book/tpus).
# The HBM that programs may use is not here: the compiler says (topology.py).
CHIPS = {
    "v5e": Chip(bf16_flops=197e12, hbm_bandwidth=819e9, host_bandwidth=16e9, link_bandwidth=45e9),
    "v5p": Chip(bf16_flops=459e12, hbm_bandwidth=2765e9, host_bandwidth=16e9, link_bandwidth=90e9),
    "v6e": Chip(bf16_flops=918e12, hbm_bandwidth=1640e9, host_bandwidth=32e9, link_bandwidth=90e9),
}
