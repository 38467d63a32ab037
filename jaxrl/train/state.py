"""What an optimizer update changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class TrainState(NamedTuple):
    """Trained weights, the optimizer's state, and the number of updates done (int32 scalar).

    The jitted step donates it: after an update the arrays of the state before are gone.
    """

    params: Any
    opt_state: Any
    step: jax.Array
