"""`accumulate_wgrad="off"`: the gradient is returned, in a fresh tensor that PyTorch takes over without a copy."""

from __future__ import annotations

from fusedmlp.contract.destinations.destination import Destination


class Returned(Destination):
    """Every gradient is returned, but for delayed ones: a queue adds them to `.grad`, or sets it."""

    name = "off"
    if_delayed = "grad"
