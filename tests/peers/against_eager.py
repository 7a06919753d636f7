"""A test of our own beside Transformers': the default experts give the values and all gradients of `eager` ones.

Transformers' tests compare values to 1e-4, at weights so small that experts change values little more than that, and
with biases of zero; they ask only that gradients exist. The same models are compared here with larger weights.
"""

import torch
from transformers import set_seed

_TOLERANCE = 1e-4  # relative to the norm; float32 gives 1e-6


class EagerTesterMixin:
    """A mixin for the class of an architecture's tests."""

    def test_values_and_gradients_are_those_of_eager_experts(self):
        for model_class in self.all_model_classes:
            set_seed(0)
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            config.initializer_range = 0.2
            model = model_class(config).eval()  # without the noise of training, but with gradients
            for name, parameter in model.named_parameters():
                if "bias" in name:
                    torch.nn.init.normal_(parameter, std=0.2)
            found = _results(model, inputs)
            model.set_experts_implementation("eager")
            for name, expected in _results(model, inputs).items():
                error = (found[name] - expected).norm() / expected.norm()
                assert error <= _TOLERANCE, f"{model_class.__name__}, {name}: off by {error:.1e}"


def _results(model, inputs):
    """The first output, and the gradient of every parameter that has one, for a random gradient of that output."""
    model.zero_grad()
    y = model(**inputs)[0]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    y.backward(dy)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"output": y.detach()} | {name: grad.clone() for name, grad in gradients.items() if grad.any()}
