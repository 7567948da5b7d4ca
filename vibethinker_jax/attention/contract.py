"""The types of the block contract, which `backends` describes: what every backend takes and gives."""

from jaxtyping import Array, Float, Float32

QueryHeads = Float[Array, "batch heads queries head_dim"]  # q and d_out: float32 or bfloat16
KeyHeads = Float[Array, "batch kv_heads keys head_dim"]  # k and v: of the same dtype
PerQuery = Float32[Array, "batch heads queries"]  # log_sum_exp, natural, of scaled scores; delta = sum(d_out * out, -1)
Attended = tuple[Float32[Array, "batch heads queries head_dim"], PerQuery]  # out, log_sum_exp
Gradients = tuple[  # dq, dk, dv
    Float32[Array, "batch heads queries head_dim"],
    Float32[Array, "batch kv_heads keys head_dim"],
    Float32[Array, "batch kv_heads keys head_dim"],
]
