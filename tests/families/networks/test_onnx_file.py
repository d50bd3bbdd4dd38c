"""Which files do not hold all of their network, told by their bytes."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from vllm_tts_cache.families.networks.onnx_file import keeps_weights_elsewhere

FLOAT = TensorProto.FLOAT


def weight(*, is_elsewhere):
    tensor = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    if is_elsewhere:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="weights.bin")
    return tensor


def graph(nodes, **given):
    output = helper.make_tensor_value_info("y", FLOAT, [2, 3])
    return helper.make_graph(nodes, "g", [], [output], **given)


def as_initializer(tensor):
    return graph([helper.make_node("Identity", ["w"], ["y"])], initializer=[tensor])


def as_constant(tensor):
    return graph([helper.make_node("Constant", [], ["y"], value=tensor)])


def in_a_branch(tensor):
    branch = as_constant(tensor)
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    return graph([node])


@pytest.mark.parametrize("placed", [as_initializer, as_constant, in_a_branch])
@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_a_tensor_elsewhere_is_found_wherever_the_model_has_it(placed, is_elsewhere):
    model = helper.make_model(placed(weight(is_elsewhere=is_elsewhere)))
    content = memoryview(model.SerializeToString())
    assert keeps_weights_elsewhere(content) is is_elsewhere
