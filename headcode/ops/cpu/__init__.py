"""The fused CPU backend."""

from headcode.ops.cpu.attention import _NO_KERNELS as _NO_KERNELS
from headcode.ops.cpu.attention import NET_CODES as NET_CODES
from headcode.ops.cpu.attention import NORM_CODES as NORM_CODES
from headcode.ops.cpu.attention import backward as backward
from headcode.ops.cpu.attention import forward as forward
from headcode.ops.cpu.attention import prefers_torch as prefers_torch
from headcode.ops.cpu.attention import saved_shape as saved_shape
from headcode.ops.cpu.attention import unsupported as unsupported
