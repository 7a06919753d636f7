"""The tests: a class for each architecture, of mixins, all but one Transformers'. Run by `python -m peers`."""

import unittest

from peers.against_eager import EagerTesterMixin
from peers.architectures import ARCHITECTURES, Tester, class_name
from peers.upstream import test_expert_parallel_mixin, test_fsdp_mixin, test_tensor_parallel_mixin
from peers.upstream.generation.test_utils import GenerationTesterMixin
from peers.upstream.test_expert_parallel_mixin import ExpertParallelTesterMixin
from peers.upstream.test_fsdp_mixin import FSDPTesterMixin
from peers.upstream.test_modeling_common import ModelTesterMixin
from peers.upstream.test_tensor_parallel_mixin import TensorParallelTesterMixin
from peers.upstream.test_training_mixin import TrainingTesterMixin

MIXINS = (
    EagerTesterMixin,
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    TensorParallelTesterMixin,
    ExpertParallelTesterMixin,
    FSDPTesterMixin,
)

# Transformers' own runs limit these to a few architectures. FSDP2 tests, which take longest, keep that limit.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_expert_parallel_mixin.EP_DISTRIBUTED_TEST_MODEL_TYPES = None
# Ranks need no core of their own, and the tests that run must not depend on the machine.
test_fsdp_mixin._get_available_fsdp_workers = lambda: 8


def _tests(architecture):
    def set_up(self):
        self.model_tester = Tester(architecture)

    def get_tiny_config(self):
        """Trainings are compared to 1e-5 at each step: rounding must not move a token from one expert to another."""
        config_class, config = FSDPTesterMixin._get_tiny_config(self)
        return config_class, config | {"initializer_range": 0.02}

    body = {
        "setUp": set_up,
        "_get_tiny_config": get_tiny_config,
        "all_model_classes": Tester(architecture).all_model_classes(),
        "__module__": __name__,
    }
    return type(class_name(architecture), (*MIXINS, unittest.TestCase), body)


for _architecture in ARCHITECTURES:
    globals()[class_name(_architecture)] = _tests(_architecture)
