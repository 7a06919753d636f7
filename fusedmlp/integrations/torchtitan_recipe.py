"""Names of recipes that users of torchtitan know."""

from __future__ import annotations

from fusedmlp import validate

# A value of torchao's MXFP8TrainingRecipe, the `recipe_name` of torchtitan's MXFP8GroupedExpertsConverter -> recipe and
# wgrad. Both round scales up, as "mxfp8" does. The first multiplies 8 bits in wgrad, too; the second bf16.
_TORCHAO = {"mxfp8_rceil": ("mxfp8", "recipe"), "mxfp8_rceil_wgrad_with_hp": ("mxfp8", "bf16")}


def resolve(recipe: str | None, wgrad: str) -> tuple[str | None, str]:
    """Translate a name of torchao's or fusedmlp's into `recipe` and `wgrad` of `fusedmlp.grouped_mlp`.

    Raises:
        ValueError: an unknown name, or `wgrad="bf16"` without a recipe that computes in bfloat16.
    """
    if recipe in _TORCHAO:
        recipe, named = _TORCHAO[recipe]
        wgrad = named if wgrad == "recipe" else wgrad
    validate.recipe(recipe, wgrad, also=list(_TORCHAO))
    return recipe, wgrad
