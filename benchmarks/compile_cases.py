"""The cases of `compile_peers.py`. Needs nothing beside `shapes`, because the peers use it too."""

from __future__ import annotations

from typing import Any

from shapes import NEW_TOKENS, PROMPT, SHAPE, SMOLLM2

_QUICKSTART = {"shape": SHAPE, "rows": 32, "prompt": PROMPT, "new": NEW_TOKENS}
_SMALL = {"shape": SMOLLM2, "rows": 16, "prompt": 256, "new": 768}
_FSDP8 = {"topology": "v5e:2x4", "fsdp": 8, "tensor": 1}
_TENSOR2 = {"topology": "v5e:2x4", "fsdp": 4, "tensor": 2}
# Nothing is recomputed and no layer is scanned, as tunix does it.
_TUNIX = {"peer": "tunix", "remat": "none", "scan": False, "param_dtype": "float32"}
# As MaxText's base.yml has it.
_MAXTEXT = {
    "peer": "maxtext",
    "remat": "full",
    "scan": True,
    "dtype": "bfloat16",
    "param_dtype": "float32",
    "attention": "autoselected",
}
# Its flash attention takes multiples of 128 tokens only.
_SHORT = {**_MAXTEXT, "attention": "dot_product"}

CASES: dict[str, dict[str, Any]] = {
    "tunix_quickstart_fsdp8": {**_TUNIX, **_QUICKSTART, **_FSDP8, "dtype": "float32"},
    "tunix_quickstart_fsdp4_tensor2": {**_TUNIX, **_QUICKSTART, **_TENSOR2, "dtype": "float32"},
    "tunix_smollm2_fsdp8": {**_TUNIX, **_SMALL, **_FSDP8, "dtype": "float32"},
    "maxtext_quickstart_fsdp8": {**_SHORT, **_QUICKSTART, **_FSDP8},
    "maxtext_quickstart_fsdp4_tensor2": {**_SHORT, **_QUICKSTART, **_TENSOR2},
    "maxtext_smollm2_fsdp8": {**_MAXTEXT, **_SMALL, **_FSDP8},
}


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes on one device by the compiler's count, of a `jax.stages.Compiled`."""
    used = compiled.memory_analysis()
    return {
        "arguments": used.argument_size_in_bytes,
        "outputs": used.output_size_in_bytes,
        "aliased": used.alias_size_in_bytes,
        "temporary": used.temp_size_in_bytes,
    }
