"""One thread at a time decides where gradients go and adds them."""

from __future__ import annotations

import threading
from contextlib import suppress

from fusedmlp.contract import engine
from fusedmlp.contract.destination import Place, label
from fusedmlp.contract.parameter_state import ParameterState

# Held while a layer's gradients are computed and added: two threads that run backward on the CPU could otherwise add
# to one main_grad at once, and one of the sums would be lost.
accumulation_lock = threading.RLock()


def release_interrupted() -> None:
    """Let go of the lock, outside of all that holds it: an interrupt can come right where `with` ends."""
    with suppress(RuntimeError):  # which says that it is not held, as it should be
        while True:
            accumulation_lock.release()


def refuse_compiled_elsewhere(state: ParameterState, place: Place) -> None:
    """Raise while the backward of a compiled graph, which holds no lock, adds to the main_grad in another backward."""
    other = state.compiled_in
    if other is None or other.over:
        return
    if not engine.inside_backward() or other is not engine.current_backward():
        raise RuntimeError(
            f"{label(place)}: a compiled backward in another thread is adding to this main_grad, and one of the "
            "sums would be lost; expected one backward after the other, or the layer outside of torch.compile"
        )
