"""jaxrl: asynchronous reinforcement learning of language models in JAX.

The trainers and the types of rewards and workflows can be imported from here; each is loaded when
it is first used, so that `import jaxrl` and `import jaxrl.sharding` load nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.orchestration.rl import RLTrainer
    from jaxrl.orchestration.sft import SFTTrainer
    from jaxrl.types import Completion, Prompt, Rejected, Sampler, SamplingParams, Trajectory

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Prompt",
    "RLTrainer",
    "Rejected",
    "SFTTrainer",
    "Sampler",
    "SamplingParams",
    "Trajectory",
    "__version__",
]

_HOMES = {"RLTrainer": "jaxrl.orchestration.rl", "SFTTrainer": "jaxrl.orchestration.sft"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "jaxrl.types")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
