"""The door to what scanlib takes from outside beyond public names, each with the reason.

The names here are PyTensor's; `xtensor`, `numba`, `jax` and `torch` have a module of their own,
which imports the package it is about.
"""

from scanlib._compat.pytensor import (
    ANGLE,
    DEG2RAD,
    DERIVATIVE_GRAPHS,
    FUSED_ELEMWISE,
    GER,
    INDEX_READS,
    INDEX_WRITES,
    INDEXED_BY_VECTOR,
    LOG_ADD_EXP,
    LOG_SUM_EXP,
    NUMBERS_INSIDE,
    PYTHON_LIBRARIES,
    PYTHON_LIBRARY_FOLDERS,
    RAD2DEG,
    READY_GRAPHS,
    UNBATCH,
    IfElse,
    LegacyScan,
    ShapeFeature,
    cloneable,
    copy_graph,
    features,
    freeze_graph,
    inline_ofg_node,
    is_legacy_scan,
    join_of,
    split_of,
    thaw_graph,
    vectorize_rule,
)
