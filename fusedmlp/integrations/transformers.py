"""Hugging Face Transformers: `experts_implementation="fusedmlp"`.

    from fusedmlp.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(
        name, experts_implementation="fusedmlp"
    )

or `register(model)`, for a model that is loaded already. Parameters, state dicts and routers stay Transformers' own:
only the function that computes the experts changes. See docs/transformers.md.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

import fusedmlp
from fusedmlp import validate
from fusedmlp.contract.checks import check_flag
from fusedmlp.contract.route import MODES, Mode
from fusedmlp.integrations import peft
from fusedmlp.integrations.fp32_accumulation import FP32Accumulation
from fusedmlp.integrations.own_dtype import without_autocast
from fusedmlp.integrations.transformers_activation import activation_of, guard_in_graph

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

_NAME = "fusedmlp"


class _Options(NamedTuple):
    accumulate_wgrad: Mode = "auto"
    recipe: str | None = None
    wgrad: str = "recipe"
    batch_invariant: bool = False


def register(
    model: PreTrainedModel | None = None,
    *,
    accumulate_wgrad: Mode = "auto",
    recipe: str | None = None,
    wgrad: str = "recipe",
    batch_invariant: bool = False,
) -> None:
    """Add `"fusedmlp"` to the implementations of experts that Transformers knows.

    With a model, the other arguments are options of this model alone, until the next `register` of it. Without one,
    they are the defaults, from now on, of every model that uses `"fusedmlp"` and has no options of its own.

    Args:
        model: check that fusedmlp can compute all experts of this model, then switch it. Without the check an
            activation that fusedmlp lacks raises in the first forward, and experts that do not use Transformers'
            interface keep their own implementation silently.
        accumulate_wgrad: see `fusedmlp.grouped_mlp`.
        recipe: likewise. None: compute in the dtype of the experts' weights, also under autocast, as Transformers' own
            experts do; with "bf16", float32 experts compute in bfloat16.
        wgrad, batch_invariant: likewise.

    Raises:
        NotImplementedError: fusedmlp cannot compute some experts; the message names their class.
        TypeError: the model is no module (its name, for example); batch_invariant is no bool.
        ValueError: no experts of the model use Transformers' interface; an unknown accumulate_wgrad, recipe or wgrad.
        ImportError: a Transformers older than 5.7.
    """
    _refuse_old_versions()
    validate.one_of("accumulate_wgrad", accumulate_wgrad, MODES)
    validate.recipe(recipe, wgrad)
    check_flag("batch_invariant", batch_invariant)
    if model is not None:
        validate.module("model", model)
    peft.install()
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    options = _Options(accumulate_wgrad, recipe, wgrad, batch_invariant)
    if model is None or _NAME not in ALL_EXPERTS_FUNCTIONS:
        defaults = options if model is None else _Options()
        ALL_EXPERTS_FUNCTIONS.register(_NAME, partial(_experts_forward, defaults=defaults))
        ALL_FP8_EXPERTS_FUNCTIONS.register(_NAME, _refuse_other_interface)
    if model is None:
        return
    experts: list[Any] = [module for module in model.modules() if peft.uses_interface(module)]
    if not experts:
        raise ValueError(
            f"model: expected experts that use Transformers' experts interface; got a {type(model).__name__} without, "
            "which ignores experts_implementation: keep its own experts"
        )
    for module in experts:
        if not _calls(module, ALL_EXPERTS_FUNCTIONS[_NAME]):
            _refuse_other_interface(module)
        activation_of(module)
    model.set_experts_implementation(_NAME)
    for module in experts:  # set_experts_implementation skips a model whose class is in a file without experts
        module.config._experts_implementation = _NAME
        module._fusedmlp_options = options
    peft.warn_of_none(model)


def fp32_accumulation() -> TrainerCallback:
    """Return a callback with which `Trainer` accumulates and clips gradients of 16-bit weights in float32.

        Trainer(model, arguments, callbacks=[fp32_accumulation()], ...)

    With Accelerate, or in your own loop, `FP32Accumulation(model, optimizer)` of
    `fusedmlp.integrations.fp32_accumulation` does the same. Errors, among them `ValueError` under
    DistributedDataParallel, are raised when training begins.
    """
    from transformers import TrainerCallback
    from transformers.training_args import ParallelMode

    class Callback(TrainerCallback):
        accumulation: FP32Accumulation | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.on_train_end(args, state, control)  # an interrupted training left its hooks
            if args.parallel_mode == ParallelMode.DISTRIBUTED and not args.fsdp:
                raise ValueError(
                    "fp32_accumulation(): expected one process, or FSDP; got several with DistributedDataParallel, "
                    "which reduces gradients in the dtype of the parameters (FSDP2 with reduce_dtype=torch.float32 and "
                    "fusedmlp.integrations.fsdp2.accumulate_in accumulates in float32)"
                )
            self.accumulation = FP32Accumulation(kwargs["model"], kwargs["optimizer"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.accumulation is not None:
                self.accumulation.remove()
                self.accumulation = None

    return Callback()


def _experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    defaults: _Options,
) -> Tensor:
    """Compute experts for Transformers: rows `[T, H]`, expert ids `[T, K]` and their weights `[T, K]` to `[T, H]`.

    Returns the dtype of `hidden_states`: under autocast, norms return float32.
    """
    experts: Any = module
    options: _Options = getattr(experts, "_fusedmlp_options", defaults)
    activation = activation_of(module)
    if torch.compiler.is_compiling():
        guard_in_graph(module)
    fc1_name = "gate_up_proj" if experts.has_gate else "up_proj"
    fc1_weight, adapters = getattr(experts, fc1_name), peft.take(module)
    with without_autocast(hidden_states.device.type):
        y = fusedmlp.moe_experts(
            hidden_states if options.recipe else hidden_states.to(fc1_weight.dtype),
            top_k_index,
            top_k_weights,
            fc1_weight,
            experts.down_proj,
            fc1_bias=getattr(experts, f"{fc1_name}_bias") if experts.has_bias else None,
            fc2_bias=experts.down_proj_bias if experts.has_bias else None,
            activation=activation,
            weight_layout="in_out" if experts.is_transposed else "out_in",
            accumulate_wgrad=options.accumulate_wgrad,
            recipe=options.recipe,
            wgrad=options.wgrad,
            batch_invariant=options.batch_invariant,
            fc1_lora=adapters.get(fc1_name),
            fc2_lora=adapters.get("down_proj"),
        )
    return y.to(hidden_states.dtype)


def _refuse_old_versions() -> None:
    import transformers
    from transformers.integrations.moe import use_experts_implementation

    if "is_concatenated" not in inspect.signature(use_experts_implementation).parameters:
        raise ImportError(
            f"register(): expected transformers>=5.7; got {transformers.__version__}, where experts_implementation "
            "accepts only Transformers' own names, and experts lack is_concatenated, which says whether gate and "
            "linear channels alternate"
        )


def _calls(module: nn.Module, function: object) -> bool:
    """Tell whether the forward of the module's class would find this function under `"fusedmlp"`.

    The decorator's forward has its table of functions in its closure; wrappers may be around it.
    """
    forward = inspect.unwrap(type(module).forward, stop=lambda wrapper: bool(_tables_of(wrapper)))
    return any(table.get(_NAME) is function for table in _tables_of(forward))


def _tables_of(forward: Any) -> list[Any]:
    from transformers.integrations.moe import ExpertsInterface

    read = inspect.getclosurevars(forward)
    return [
        value
        for names in (read.nonlocals, read.globals)
        for value in names.values()
        if isinstance(value, ExpertsInterface)
    ]


def _refuse_other_interface(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    """Raise for experts that fusedmlp would not compute; registered for experts in fp8."""
    raise NotImplementedError(
        f'{type(module).__name__}: expected a forward that looks "fusedmlp" up among the implementations of experts '
        "that Transformers knows (ALL_EXPERTS_FUNCTIONS); got one of its own, as experts have whose weights are "
        "quantized and have scales. Use another experts_implementation for this model, or load it unquantized"
    )
