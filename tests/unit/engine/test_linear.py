"""The transposed product gives what the plain one gives, whatever the shape."""

import pytest
import torch

from replicas.forward.linear import FEW_ROWS_MAX, FEW_ROWS_MIN, speed_up_few_rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, FEW_ROWS_MIN - 1, FEW_ROWS_MIN, 8, FEW_ROWS_MAX, FEW_ROWS_MAX + 1])
def test_the_values_are_those_of_the_plain_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 40, bias=bias)
    for shape in ((rows, 24), (1, rows, 24)):
        x = torch.randn(shape)
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert speed_up_few_rows(layer) == 1
        assert layer(x).shape == expected.shape
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_a_transposed_input_is_taken_as_it_is() -> None:
    layer = torch.nn.Linear(24, 40)
    x = torch.randn(24, 8).t()
    speed_up_few_rows(layer)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-6)


def test_other_types_and_derived_layers_are_left_alone() -> None:
    class Derived(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16), Derived(4, 4), torch.nn.Linear(4, 4))
    assert speed_up_few_rows(model) == 1
