"""What the cores can do at most: the fastest large matrix product that torch has here."""

from collections.abc import Mapping
from typing import Any

import torch

from headcode.train.cost import product_speed

SIZES = (512, 1024)


def measured_peaks(seconds: float = 0.2) -> dict[str, float]:
    """FLOP/s in float32, and in bf16 where the processor has instructions for it.

    By torch's default library and by oneDNN, for each size: on an AMD processor the first does not use AVX-512.
    """
    libraries = (False, True) if torch.backends.mkldnn.is_available() else (False,)
    dtypes = {"float32": torch.float32} | ({"bf16": torch.bfloat16} if has_bf16() else {})
    return {
        name: max(product_speed(size, seconds, dtype, onednn) for size in SIZES for onednn in libraries)
        for name, dtype in dtypes.items()
    }


def has_bf16() -> bool:
    """Whether the processor multiplies in bf16: by AVX-512, AMX or ARM's instructions."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer than torch 2.8
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
