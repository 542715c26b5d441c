"""What the processor can do that this process runs on."""

from functools import cache

import llvmlite.binding as llvm

# Processors, by LLVM's names.
HALVING = ("znver1", "bdver4")
FORESEEING = ("znver4", "znver5")  # the first was measured, its successor was not


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

    Where units take registers by halves of 128 bits, moving numbers between the halves takes longer
    than what is done with them: affine scans with short vectors take 0.75 of the time.
    """
    return 16 if not _has("avx2") or processor()[0] in HALVING else register_bytes()


def foresees_rows() -> bool:
    """Whether the processor guesses the rows of later steps by itself, past the ends of pages.

    Asking for them spares a third of the time elsewhere, and takes 1.2 to 1.5 times as long here.
    """
    return processor()[0] in FORESEEING
