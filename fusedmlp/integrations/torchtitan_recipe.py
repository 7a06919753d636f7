"""Recipes of torchtitan's experts: fusedmlp's names, and those that torchtitan's own MXFP8 converter takes."""

from __future__ import annotations

from fusedmlp import validate

# `recipe_name` of MXFP8GroupedExpertsConverter, a value of torchao's MXFP8TrainingRecipe -> recipe and wgrad. Both
# round scales up, as "mxfp8" does.
_TORCHAO = {"mxfp8_rceil": ("mxfp8", "recipe"), "mxfp8_rceil_wgrad_with_hp": ("mxfp8", "bf16")}


def resolve(recipe: str | None, wgrad: str) -> tuple[str | None, str]:
    """Translate either kind of name into `recipe` and `wgrad` of `fusedmlp.grouped_mlp`.

    Raises:
        ValueError: an unknown name, or `wgrad="bf16"` without a recipe that computes in bfloat16.
    """
    if recipe in _TORCHAO:
        recipe, named = _TORCHAO[recipe]
        wgrad = named if wgrad == "recipe" else wgrad
    validate.recipe(recipe, wgrad, also=list(_TORCHAO))
    return recipe, wgrad
