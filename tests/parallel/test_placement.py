import jax
import pytest
from jax.sharding import PartitionSpec

from tests.models.tiny import tiny_config
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import named_parameters, parameter_shardings
from vibethinker_jax.parallel.mesh import AXES, make_mesh
from vibethinker_jax.parallel.rules import SMALL_BYTES, Placement, placement_table

LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 4096}


def test_mesh_axes_fill_up_and_wrong_sizes_are_explained():
    assert dict(make_mesh(fsdp=-1).shape) == {"replica": 1, "fsdp": 8, "context": 1, "tensor": 1}
    assert dict(make_mesh(fsdp=2, context=2, tensor=-1).shape)["tensor"] == 2
    assert make_mesh(devices=jax.devices()[:1]).axis_names == AXES
    with pytest.raises(UserError, match=r"needs 16 devices .*fsdp 4 x context 4.* there are 8"):
        make_mesh(fsdp=4, context=4)
    with pytest.raises(UserError, match="fsdp and tensor are both -1"):
        make_mesh(fsdp=-1, tensor=-1)
    with pytest.raises(UserError, match=r"mesh\.context is 0"):
        make_mesh(context=0)
    with pytest.raises(UserError, match="needs 3 devices or a multiple"):
        make_mesh(fsdp=-1, context=3)


def test_parameters_are_placed_as_the_rules_say():
    config = tiny_config(**LARGE)
    shardings = parameter_shardings(config, Placement(make_mesh(fsdp=2, context=2, tensor=2)))
    assert shardings["embed"]["table"].spec == PartitionSpec(("context", "tensor"), "fsdp")
    attention = shardings["layers"]["attention"]
    assert attention["q"]["kernel"].spec == PartitionSpec(None, ("fsdp", "context"), "tensor", None)
    assert attention["k"]["bias"].spec == PartitionSpec(None, "tensor", None)
    assert attention["out"]["kernel"].spec == PartitionSpec(None, "tensor", None, ("fsdp", "context"))
    assert shardings["layers"]["mlp"]["down"]["kernel"].spec == PartitionSpec(None, "tensor", ("fsdp", "context"))


def test_two_kv_heads_on_tensor_four_are_replicated():
    config = tiny_config(**LARGE)
    shardings = parameter_shardings(config, Placement(make_mesh(fsdp=2, tensor=4)))
    assert shardings["layers"]["attention"]["k"]["kernel"].spec == PartitionSpec(None, ("fsdp", "context"), None, None)
    assert shardings["layers"]["attention"]["q"]["kernel"].spec[2] == "tensor"


@pytest.mark.parametrize(
    "axes", [{"fsdp": 8}, {"fsdp": 2, "context": 2, "tensor": 2}, {"context": 4, "tensor": 2}], ids=str
)
def test_no_large_array_is_left_whole(axes):
    config, placement = tiny_config(**LARGE), Placement(make_mesh(**axes))
    table = placement_table(placement, {name: (s.axes, s.shape) for name, s in named_parameters(config).items()})
    print(table)
    assert "layers/attention/q/kernel" in table
    for name, spec in named_parameters(config).items():
        sharding = placement.sharding(spec.axes, spec.shape)
        elements = 1
        for length in sharding.shard_shape(spec.shape):
            elements *= length
        whole = 1
        for length in spec.shape:
            whole *= length
        if 4 * whole > SMALL_BYTES:
            assert elements * 8 == whole, f"{name} holds {elements} of {whole} elements per device"


def test_a_large_array_that_does_not_divide_is_refused_and_a_small_one_replicated():
    placement = Placement(make_mesh(fsdp=8))
    with pytest.raises(UserError, match="fsdp x context = 8 does not divide axis 'embed' of length 2049"):
        placement.spec(("embed", None), (2049, 512))
    assert placement.spec(("embed",), (49,)) == PartitionSpec(None)
    assert Placement(None).sharding(("embed",), (48,)) is None
