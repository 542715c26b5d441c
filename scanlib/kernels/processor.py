"""What the processor can do that this process runs on."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm

HALVING = ("znver1", "bdver4")  # have 256-bit registers, and units of 128 bits


@cache
def processor() -> tuple[str, str]:
    """Return the name of the processor and its features, as LLVM writes them."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _has(feature: str) -> bool:
    return f"+{feature}" in processor()[1].split(",")


def has_fused_multiply_add() -> bool:
    """Whether the processor multiplies and adds in one instruction."""
    return _has("fma") or _has("neon")


def register_bytes() -> int:
    """Return how many bytes vectors have: one register, or two short ones."""
    return 64 if _has("avx512f") else 32


def shuffled_bytes() -> int:
    """Return how many bytes vectors have whose numbers move between lanes again and again.

    Where units work on 128 bits at a time, moves between the halves of a vector take longer than
    what is done with them: with short vectors, affine scans take 0.75 of the time.
    """
    has_whole_units = _has("avx2") and processor()[0] not in HALVING
    return register_bytes() if has_whole_units else 16
