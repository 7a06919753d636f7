"""The list of owners, and the refusal of a gradient that they would miss."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from fusedmlp.contract.checks import label
from fusedmlp.contract.owners import ddp, deepspeed, fsdp2
from fusedmlp.contract.parameter_state import Place

OWNERS = (fsdp2, ddp, deepspeed)


def present_owners() -> list[ModuleType]:
    """The owners in this process; none, as nearly always under Megatron."""
    return [owner for owner in OWNERS if owner.present()]


def refuse_owner(param: Tensor, owners: Sequence[ModuleType], place: Place, past: str) -> None:
    """Raise if something reduces `.grad` of this parameter. `past`: where its gradient goes past that; "": later."""
    owner = next((owner for owner in owners if owner.owns(param)), None)
    if owner is not None:
        raise RuntimeError(
            f"{label(place)}: {owner.NAME} reduces this parameter's .grad when backward ends, and would miss "
            f"{f'one in {past}' if past else 'a delayed gradient'}; {owner.ADVICE}"
        )
